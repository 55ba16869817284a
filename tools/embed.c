/* embed.c - writes a file as a C array: embed NAME < FILE > NAME.h. Run by the Makefile.
 */
#include <stdio.h>

int main(int argc, char **argv)
{
    unsigned long n = 0;
    int c;

    if (argc != 2) {
        fprintf(stderr, "usage: embed NAME < FILE\n");
        return 2;
    }
    printf("/* made by tools/embed.c */\nstatic const unsigned char %s[] = {", argv[1]);
    while ((c = getchar()) != EOF)
        printf(n++ % 24 == 0 ? "\n%d," : "%d,", c);
    printf("\n};\n");
    return ferror(stdin) || ferror(stdout) ? 1 : 0;
}
