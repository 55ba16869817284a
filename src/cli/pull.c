#include "cli/cli.h"
int cmd_pull(const hx_cli *c)
{
    (void)c;
    return 1;
}
int cli_pull(const hx_pull *p, hx_err *err)
{
    (void)p;
    (void)err;
    return 1;
}
