/* fuzz_replay.c - runs a fuzz target over files: the corpora are part of `make test` this
 * way. Usage: x_replay FILE… Prints how many it ran. */
#include <stdio.h>

#include "base/base.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        char *text;
        size_t n;
        hx_err err = { 0 };

        if (hx_file_read(argv[i], 64u << 20, &text, &n, &err) != 0) {
            fprintf(stderr, "%s\n", err.msg);
            return 1;
        }
        LLVMFuzzerTestOneInput((const uint8_t *)text, n);
        hx_free(text);
    }
    printf("%d inputs\n", argc - 1);
    return 0;
}
