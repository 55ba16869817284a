/* main.c - the command line: one table of commands and one of options, from which help,
 * man page and parsing follow; opening an engine with its progress. Commands live in
 * files of their own (cmd_* in cli.h), whose result is the exit status. */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "cli/cli.h"

/* ---- tables ----------------------------------------------------------- */

enum {
    SERVE = 1 << 0,
    RUN = 1 << 1,
    CHAT = 1 << 2,
    LOGITS = 1 << 3,
    INSPECT = 1 << 4,
    BENCH = 1 << 5,
    CONNECT = 1 << 6,
    QUANTIZE = 1 << 7,
    SCORE = 1 << 8,
    PULL = 1 << 9,
    PLAN = 1 << 10,
    ENGINE = SERVE | RUN | CHAT | LOGITS | BENCH | SCORE | PLAN
};

typedef struct {
    const char *name, *args, *help;
    int bit;
    int (*run)(const hx_cli *c);
} command;

static const command commands[] = {
    { "serve", "[MODEL]", "serve MODEL over HTTP (default: the bundled demo model)",
      SERVE, cmd_serve },
    { "chat", "[MODEL]", "talk to MODEL in the terminal", CHAT, cmd_chat },
    { "run", "MODEL -p TEXT", "one answer on standard output, figures on standard error",
      RUN, cmd_run },
    { "logits", "MODEL --ids FILE --out FILE",
      "write float32 logits of a list of token ids", LOGITS, cmd_logits },
    { "inspect", "MODEL", "what a checkpoint holds", INSPECT, cmd_inspect },
    { "plan", "MODEL",
      "what it takes of this machine's memories, and the speed to expect", PLAN,
      cmd_plan },
    { "bench", "[ops|decode|prefill|serve|trace|compare] [MODEL]",
      "measured speed beside this machine's ceilings; compare A B: two results; trace "
      "FILE: what a cache makes of recorded picks",
      BENCH, cmd_bench },
    { "connect", "CLIENT", "a client's configuration for this server", CONNECT,
      cmd_connect },
    { "quantize", "IN OUT --bits K --calib FILE",
      "make an EXL3 checkpoint of one in BF16, F16, F32 or FP8", QUANTIZE, cmd_quantize },
    { "score", "MODEL [MODEL...]",
      "quality: perplexity, divergence from a panel or a second model", SCORE,
      cmd_score },
    { "pull", "REPO[@REV] DIR", "download a model, or what is missing of it", PULL,
      cmd_pull },
};

typedef enum { OPT_STR, OPT_INT, OPT_SIZE, OPT_NUM, OPT_FLAG, OPT_LIST } option_kind;

typedef struct {
    const char *name, *arg, *help;
    option_kind kind;
    size_t offset; /* in hx_cli */
    size_t given;  /* bool set when the option is there; 0: none */
    int where;
    int64_t min, max;
} option;

#define AT(m) offsetof(hx_cli, m)
static const option options[] = {
    { "--host", "ADDR", "address to listen on (127.0.0.1)", OPT_STR, AT(host), 0, SERVE,
      0, 0 },
    { "--port", "N", "port to listen on (30000); 0 picks a free one", OPT_INT, AT(port),
      0, SERVE, 0, 65535 },
    { "--unix", "PATH", "listen on a unix socket instead", OPT_STR, AT(unix_path), 0,
      SERVE, 0, 0 },
    { "--tls-cert", "FILE", "speak TLS with this certificate (PEM, or a chain)", OPT_STR,
      AT(tls_cert), 0, SERVE, 0, 0 },
    { "--tls-key", "FILE", "its key (PEM)", OPT_STR, AT(tls_key), 0, SERVE, 0, 0 },
    { "--api-key", "[NAME=]KEY",
      "ask clients for this key; several: one of them, and the log has its name",
      OPT_LIST, AT(api_keys), 0, SERVE | CONNECT | BENCH, 0, 0 },
    { "--api-key-file", "FILE", "more of them, one a line; # begins a comment", OPT_STR,
      AT(api_key_file), 0, SERVE, 0, 0 },
    { "--admin-key", "KEY", "ask for this one where the server itself is concerned",
      OPT_STR, AT(admin_key), 0, SERVE, 0, 0 },
    { "--served-name", "NAME", "the model's name in the API (its folder's)", OPT_STR,
      AT(served_name), 0, SERVE | CONNECT, 0, 0 },
    { "--cors", "ORIGIN", "allowed browser origin, or off (*)", OPT_STR, AT(cors), 0,
      SERVE, 0, 0 },
    { "--official-tokens", NULL,
      "special tokens spelled in messages become tokens, as the official code does",
      OPT_FLAG, AT(official), 0, SERVE | CHAT | RUN, 0, 0 },
    { "--ctx", "N", "longest sequence in tokens (the model's, within the memory)",
      OPT_INT, AT(ctx), 0, ENGINE | CONNECT, 1, INT32_MAX },
    { "--streams", "N", "sequences decoded together (8, or as many as have room)",
      OPT_INT, AT(streams), 0, SERVE | BENCH | PLAN, 1, 64 },
    { "--queue", "N", "requests that may wait (256)", OPT_INT, AT(queue), 0, SERVE, 1,
      1 << 20 },
    { "--decode-share", "F",
      "part of its rate that an answer keeps beside a prompt being read, 0..1 (0.5)",
      OPT_NUM, AT(decode_share), AT(has_share), SERVE | BENCH, 0, 1 },
    { "--key-streams", "N", "requests of one API key decoded together (all)", OPT_INT,
      AT(key_streams), 0, SERVE, 1, 64 },
    { "--key-queue", "N", "requests of one API key that may wait (all)", OPT_INT,
      AT(key_queue), 0, SERVE, 1, 1 << 20 },
    { "--no-canary", NULL, "no check of a known answer at start and when idle", OPT_FLAG,
      AT(no_canary), 0, SERVE, 0, 0 },
    { "--quiet", NULL, "no line per request on standard error", OPT_FLAG, AT(quiet), 0,
      SERVE, 0, 0 },
    { "--log-prompts", NULL,
      "bodies of requests, prompts among them, on standard error (their first 1,000 "
      "bytes)",
      OPT_FLAG, AT(log_prompts), 0, SERVE, 0, 0 },
    { "--record", "FILE", "append a line per request there, for run --replay", OPT_STR,
      AT(record), 0, SERVE, 0, 0 },
    { "--trace", "FILE",
      "what routers pick in decode steps goes there, for bench trace (needs --vram less "
      "than the experts take)",
      OPT_STR, AT(trace), 0, SERVE | BENCH, 0, 0 },
    { "--slots", "N[,N]", "of bench trace: sizes of the cache (5 to 50 % of the experts)",
      OPT_STR, AT(slots), 0, BENCH, 0, 0 },
    { "--verify-memory", NULL,
      "compare weights in host memory with their checksums, again and again, in the "
      "background",
      OPT_FLAG, AT(verify_memory), 0, SERVE, 0, 0 },
    { "--replay", "FILE[:N]", "run line N (the last) of a record again, and compare",
      OPT_STR, AT(replay), 0, RUN, 0, 0 },
    { "--dump-dir", "DIR", "where ids and settings of broken answers are kept (nowhere)",
      OPT_STR, AT(dump_dir), 0, SERVE, 0, 0 },
    { "--cache", "SIZE",
      "sequence memory (what the streams need, at most a quarter of the memory, or of "
      "what weights leave of a GPU's)",
      OPT_SIZE, AT(cache), 0, ENGINE, 0, 0 },
    { "--kv", "bf16|fp8|f32",
      "how attention memory is kept (bf16); fp8 takes about half, f32 is for comparisons",
      OPT_STR, AT(kv), 0, ENGINE, 0, 0 },
    { "--prefix", "reuse|strict|off",
      "go on from what earlier requests left; strict: only from what was read as a "
      "prompt "
      "(reuse)",
      OPT_STR, AT(prefix), 0, SERVE | CHAT, 0, 0 },
    { "--park-ram", "SIZE",
      "host memory for kept states and parked pages (an eighth of it, at most half of "
      "what weights leave and 16GiB)",
      OPT_SIZE, AT(park_ram), 0, SERVE | CHAT | BENCH | PLAN, 0, 0 },
    { "--park-dir", "DIR", "idle conversations are also kept here, over restarts",
      OPT_STR, AT(park_dir), 0, SERVE | CHAT | BENCH | PLAN, 0, 0 },
    { "--park-disk", "SIZE", "most that --park-dir may hold (32GiB)", OPT_SIZE,
      AT(park_disk), 0, SERVE | CHAT | BENCH | PLAN, 0, 0 },
    { "--threads", "N",
      "compute threads (one for each of --cpus, or of those this process may use)",
      OPT_INT, AT(threads), 0, ENGINE | QUANTIZE, 1, 1024 },
    { "--cpus", "LIST", "CPUs to pin them to, like 0-7,16", OPT_STR, AT(cpus), 0,
      ENGINE | QUANTIZE, 0, 0 },
    { "--isa", "NAME", "avx512, avx2 or scalar (the best this CPU has)", OPT_STR, AT(isa),
      0, ENGINE, 0, 0 },
    { "--device", "NAME",
      "cuda, cuda:N, cpu, or ref: the double-precision reference, slow (cuda where there "
      "is a GPU and this build has code for one, else cpu)",
      OPT_STR, AT(device), 0, ENGINE | QUANTIZE, 0, 0 },
    { "--vram", "SIZE", "GPU memory to use (what is free)", OPT_SIZE, AT(vram), 0, ENGINE,
      0, 0 },
    { "--ram", "SIZE", "host memory that experts may take (what is available)", OPT_SIZE,
      AT(ram), 0, ENGINE, 0, 0 },
    { "--mode", "auto|gpu-only", "with or without experts on the CPU beside a GPU (auto)",
      OPT_STR, AT(mode), 0, ENGINE, 0, 0 },
    { "--expert-us", "A,B,C,D,E",
      "costs of an expert instead of measured ones: in GPU memory, over the link, on the "
      "CPU, there each row more, the post to it",
      OPT_STR, AT(expert_us), 0, ENGINE, 0, 0 },
    { "--url", "URL", "the server (http://127.0.0.1:30000)", OPT_STR, AT(url), 0, CONNECT,
      0, 0 },
    { "--write", NULL, "write the client's files, after asking", OPT_FLAG, AT(write), 0,
      CONNECT, 0, 0 },
    { "--home", "DIR", "where those files are (your home folder)", OPT_STR, AT(home), 0,
      CONNECT, 0, 0 },
    { "-p", "TEXT", "the prompt; -: what comes on standard input", OPT_STR, AT(prompt), 0,
      RUN, 0, 0 },
    { "-n", "N", "most tokens to generate", OPT_INT, AT(n), 0, RUN | CHAT | BENCH | SCORE,
      1, INT32_MAX },
    { "--temp", "T", "temperature; 0 is greedy (the model's)", OPT_NUM, AT(temp),
      AT(has_temp), RUN | CHAT, 0, 100 },
    { "--seed", "S", "seed of the draws (random)", OPT_INT, AT(seed), AT(has_seed),
      RUN | CHAT | BENCH | SCORE | INSPECT, 0, INT64_MAX },
    { "--raw", NULL, "the prompt as it is, without the chat template", OPT_FLAG, AT(raw),
      0, RUN, 0, 0 },
    { "--ids", "FILE", "JSON list of token ids", OPT_STR, AT(ids), 0, LOGITS, 0, 0 },
    { "--out", "FILE", "where the result goes", OPT_STR, AT(out), 0, LOGITS | SCORE, 0,
      0 },
    { "--panel", "FILE", "reference tokens with their 20 most likely ids, JSON", OPT_STR,
      AT(panel), 0, SCORE, 0, 0 },
    { "--text", "FILE[,FILE]", "texts to score", OPT_STR, AT(text), 0, SCORE, 0, 0 },
    { "--window", "N", "texts are scored in windows of N tokens (512)", OPT_INT,
      AT(window), 0, SCORE, 16, 1 << 20 },
    { "--lead", "TEXT", "put before every window, not scored, like '[gMASK]<sop>'",
      OPT_STR, AT(lead), 0, SCORE, 0, 0 },
    { "--against", "MODEL", "the reference that divergence is measured from", OPT_STR,
      AT(against), 0, SCORE, 0, 0 },
    { "--with", "LIST",
      "settings of the reference, like kv=f32,isa=scalar,device=ref (without --against: "
      "of MODEL itself)",
      OPT_STR, AT(with), 0, SCORE, 0, 0 },
    { "--decode", NULL,
      "score the decode path too: the same tokens one by one through the engine",
      OPT_FLAG, AT(decode), 0, SCORE, 0, 0 },
    { "--greedy", "N",
      "compare N greedy tokens after each beginning with the reference's", OPT_INT,
      AT(greedy), 0, SCORE, 1, 1 << 20 },
    { "--needle", "N[,N]", "find a code in a filler of N tokens, at five depths", OPT_STR,
      AT(needle), 0, SCORE, 0, 0 },
    { "--write-panel", "FILE", "write what was scored as a panel", OPT_STR,
      AT(write_panel), 0, SCORE, 0, 0 },
    { "--plot", "FILE", "draw divergence by position, and by size, as SVG", OPT_STR,
      AT(plot), 0, SCORE, 0, 0 },
    { "--protocol", "NAME",
      "random-prefill, greedy-decode, decode-32k, evenness, structured or prose", OPT_STR,
      AT(protocol), 0, BENCH, 0, 0 },
    { "--tokens", "N[,N]",
      "of bench prefill: lengths of prompts; of bench decode: tokens that are there "
      "first",
      OPT_STR, AT(tokens), 0, BENCH, 0, 0 },
    { "--files", "GLOB[,GLOB]", "only these files (all)", OPT_STR, AT(files), 0,
      PULL | SERVE, 0, 0 },
    { "--pull", "REPO[@REV]", "first download this into MODEL, an empty folder", OPT_STR,
      AT(pull), 0, SERVE, 0, 0 },
    { "--positions", "all|last:N", "which rows (all)", OPT_STR, AT(positions), 0, LOGITS,
      0, 0 },
    { "--json", "FILE", "write the figures there too", OPT_STR, AT(json), 0, BENCH, 0,
      0 },
    { "--mixes", "LIST",
      "of bench serve: follow, newcomer, agents, shared, beside, cancels, slow, crowd "
      "(all)",
      OPT_STR, AT(mixes), 0, BENCH, 0, 0 },
    { "--bits", "K", "average bits per weight, 1 to 8, also fractions", OPT_NUM, AT(bits),
      0, QUANTIZE, 1, 8 },
    { "--head-bits", "K", "bits of the output matrix (6)", OPT_NUM, AT(head_bits), 0,
      QUANTIZE, 1, 8 },
    { "--codebook", "NAME", "mul1, mcg or 3inst (mul1)", OPT_STR, AT(codebook), 0,
      QUANTIZE, 0, 0 },
    { "--half-rates", NULL, "also use 1.5, 2.5 and 3.5 bits (older readers lack them)",
      OPT_FLAG, AT(half_rates), 0, QUANTIZE, 0, 0 },
    { "--calib", "FILE|none", "text, or JSON lists of token ids, to calibrate with",
      OPT_STR, AT(calib), 0, QUANTIZE, 0, 0 },
    { "--calib-rows", "N", "rows of it to use (250)", OPT_INT, AT(calib_rows), 0,
      QUANTIZE, 1, 1 << 20 },
    { "--calib-cols", "N", "tokens in a row (2048)", OPT_INT, AT(calib_cols), 0, QUANTIZE,
      16, 1 << 20 },
    { "--resume", NULL, "go on with a conversion that was broken off", OPT_FLAG,
      AT(resume), 0, QUANTIZE, 0, 0 },
    { "--tensors", NULL, "list every tensor", OPT_FLAG, AT(tensors), 0, INSPECT, 0, 0 },
    { "--verify", NULL, "read every byte and check every rule", OPT_FLAG, AT(verify), 0,
      INSPECT, 0, 0 },
    { "--help", NULL, "this text", OPT_FLAG, AT(help), 0, ~0, 0, 0 },
};

/* ---- help ------------------------------------------------------------- */

static void print_options(FILE *f, int where)
{
    for (size_t i = 0; i < HX_LEN(options); i++) {
        const option *o = &options[i];
        char left[64];

        if ((o->where & where) == 0)
            continue;
        snprintf(left, sizeof left, "%s%s%s", o->name, o->arg ? " " : "",
                 o->arg ? o->arg : "");
        fprintf(f, "  %-22s %s\n", left, o->help);
    }
}

static void print_usage(FILE *f)
{
    fprintf(
        f,
        "hoist %s - runs mixture-of-experts models far larger than the GPU\n\nusage:\n",
        HX_VERSION);
    for (size_t i = 0; i < HX_LEN(commands); i++)
        fprintf(f, "  hoist %-8s %-28s %s\n", commands[i].name, commands[i].args,
                commands[i].help);
    fprintf(
        f,
        "\nhoist COMMAND --help lists a command's options. SIZE is like 24GiB or 900MB.\n"
        "MODEL is a folder with config.json and safetensors, or "
        "synthetic:glm-5.3-flash[,layers=N].\n");
}

static void print_help(const command *c)
{
    printf("usage: hoist %s %s [options]\n\n%s.\n\n", c->name, c->args, c->help);
    print_options(stdout, c->bit);
}

static void print_man(void)
{
    printf(".TH HOIST 1 \"\" \"hoist %s\"\n.SH NAME\nhoist \\- run and serve "
           "mixture-of-experts models\n"
           ".SH SYNOPSIS\n",
           HX_VERSION);
    for (size_t i = 0; i < HX_LEN(commands); i++)
        printf(".B hoist %s\n%s [options]\n.br\n", commands[i].name, commands[i].args);
    printf(".SH COMMANDS\n");
    for (size_t i = 0; i < HX_LEN(commands); i++)
        printf(".TP\n.B %s\n%s.\n", commands[i].name, commands[i].help);
    printf(".SH OPTIONS\n");
    for (size_t i = 0; i < HX_LEN(options); i++) {
        printf(".TP\n.B \\%s %s\n%s. Commands:", options[i].name,
               options[i].arg ? options[i].arg : "", options[i].help);
        for (size_t j = 0; j < HX_LEN(commands); j++)
            if (options[i].where & commands[j].bit)
                printf(" %s", commands[j].name);
        printf(".\n");
    }
    printf(".SH EXIT STATUS\n0 on success, 1 on an error (one sentence on standard "
           "error), 2 for wrong usage.\n");
}

/* ---- parsing ---------------------------------------------------------- */

static const option *find_option(const char *name, int where)
{
    for (size_t i = 0; i < HX_LEN(options); i++)
        if (strcmp(options[i].name, name) == 0 && (options[i].where & where) != 0)
            return &options[i];
    return NULL;
}

static int set_int(const option *o, const char *value, int64_t *out, hx_err *err)
{
    char *end;

    errno = 0;
    *out = strtoll(value, &end, 10);
    if (*value == '\0' || *end != '\0' || errno != 0 || *out < o->min || *out > o->max)
        return hx_fail(err, HX_EARG,
                       "%s: \"%.60s\", expected an integer in %" PRId64 "..%" PRId64,
                       o->name, value, o->min, o->max);
    return 0;
}

static int set_num(const option *o, const char *value, double *out, hx_err *err)
{
    char *end;

    *out = strtod(value, &end);
    if (*value == '\0' || *end != '\0' ||
        !(*out >= (double)o->min && *out <= (double)o->max))
        return hx_fail(err, HX_EARG,
                       "%s: \"%.60s\", expected a number in %" PRId64 "..%" PRId64,
                       o->name, value, o->min, o->max);
    return 0;
}

static int set_size(const option *o, const char *value, uint64_t *out, hx_err *err)
{
    hx_err why = { 0 };
    const int rc = hx_parse_size(value, out, &why);

    if (rc == 0 && *out == 0)
        return hx_fail(err, HX_EARG, "%s: found 0, expected a size: %s", o->name,
                       o->help);
    return rc == 0 ? 0 : hx_fail(err, rc, "%s: %.200s", o->name, why.msg);
}

static int add_word(const option *o, const char *value, cli_list *out, hx_err *err)
{
    if (out->n == (int32_t)HX_LEN(out->p))
        return hx_fail(err, HX_ELIMIT, "%s: more than %zu times", o->name,
                       HX_LEN(out->p));
    out->p[out->n++] = value;
    return 0;
}

static int set_option(hx_cli *c, const option *o, const char *value, hx_err *err)
{
    char *at = (char *)c + o->offset;

    if (o->given != 0)
        *((bool *)(void *)((char *)c + o->given)) = true;
    if (o->kind != OPT_FLAG && *value == '\0')
        return hx_fail(err, HX_EARG, "%s: empty, expected %s", o->name, o->arg);
    switch (o->kind) {
    case OPT_FLAG:
        *(bool *)(void *)at = true;
        return 0;
    case OPT_STR:
        memcpy(at, &value, sizeof value);
        return 0;
    case OPT_INT:
        return set_int(o, value, (int64_t *)(void *)at, err);
    case OPT_NUM:
        return set_num(o, value, (double *)(void *)at, err);
    case OPT_LIST:
        return add_word(o, value, (cli_list *)(void *)at, err);
    case OPT_SIZE:
        return set_size(o, value, (uint64_t *)(void *)at, err);
    }
    return 0;
}

/* Words that may follow the model. */
static int32_t max_more(const hx_cli *c, const command *cmd)
{
    if (cmd->bit == SCORE)
        return (int32_t)HX_LEN(c->more) - 1;
    return cmd->bit == PULL ||
           (cmd->bit == BENCH && c->what != NULL && strcmp(c->what, "compare") == 0);
}

/* A word that is no option: bench's first may say what, the next is the model. */
static int set_word(hx_cli *c, const command *cmd, const char *word, hx_err *err)
{
    const bool what = cmd->bit == BENCH && c->what == NULL && c->model == NULL &&
                      (strcmp(word, "ops") == 0 || strcmp(word, "decode") == 0 ||
                       strcmp(word, "prefill") == 0 || strcmp(word, "serve") == 0 ||
                       strcmp(word, "compare") == 0 || strcmp(word, "trace") == 0);

    if (*word == '\0')
        return hx_fail(err, HX_EARG, "found an empty word, expected %s", cmd->args);
    if (what || (cmd->bit == CONNECT && c->what == NULL))
        c->what = word;
    else if (c->model == NULL && cmd->bit != CONNECT)
        c->model = word;
    else if (cmd->bit == QUANTIZE && c->out == NULL)
        c->out = word;
    else if (c->n_more < max_more(c, cmd))
        c->more[c->n_more++] = word;
    else
        return hx_fail(err, HX_EARG, "unexpected word \"%.80s\"", word);
    return 0;
}

static int parse(hx_cli *c, const command *cmd, int argc, char **argv, hx_err *err)
{
    for (int i = 2; i < argc; i++) {
        const char *value = strchr(argv[i], '=');
        const option *o;
        char name[64];
        int rc;

        if (argv[i][0] != '-' || argv[i][1] == '\0') {
            if ((rc = set_word(c, cmd, argv[i], err)) != 0)
                return rc;
            continue;
        }
        snprintf(name, sizeof name, "%.*s", (int)strcspn(argv[i], "="), argv[i]);
        if ((o = find_option(strcmp(name, "-h") == 0 ? "--help" : name, cmd->bit)) ==
            NULL)
            return hx_fail(err, HX_EARG, "%s has no option %.60s; see hoist %s --help",
                           cmd->name, argv[i], cmd->name);
        if (o->kind == OPT_FLAG && value != NULL)
            return hx_fail(err, HX_EARG, "%s takes no value", o->name);
        if (o->kind != OPT_FLAG && value == NULL && i + 1 == argc)
            return hx_fail(err, HX_EARG, "%s needs a value (%s)", o->name, o->arg);
        if (value != NULL)
            value++;
        else if (o->kind != OPT_FLAG)
            value = argv[++i];
        if ((rc = set_option(c, o, value, err)) != 0)
            return rc;
    }
    return 0;
}

/* ---- what commands share ---------------------------------------------- */

static int32_t find_token(void *ud, hx_str text)
{
    return hx_token_id(ud, text);
}

int cli_reply_open(hx_reply **out, hx_engine *e, const int32_t *ids, int64_t n,
                   hx_err *err)
{
    hx_info info;
    hx_reply_opt opt = { .find = find_token, .ud = e };

    hx_get_info(e, &info);
    opt.format = hx_reply_find(info.reply_format);
    opt.in_reasoning = n > 0 && ids[n - 1] == hx_token_id(e, HX_STR("<think>"));
    return hx_reply_open(out, &opt, err);
}

int cli_reply_feed(hx_reply *r, const hx_event *ev, hx_reply_sink *sink, void *ud,
                   hx_err *err)
{
    int32_t from = 0;

    for (int32_t i = 0; i < ev->n_tokens; i++) {
        const hx_str bytes = { ev->bytes.p + from, (size_t)(ev->end[i] - from) };
        const int rc = hx_reply_feed(r, ev->tokens[i], bytes, sink, ud, err);

        if (rc != 0)
            return rc;
        from = ev->end[i];
    }
    return 0;
}

int cli_chat_ids(hx_engine *e, const char *text, bool closed, int32_t **ids, int64_t *n,
                 hx_err *err)
{
    const int32_t close = hx_token_id(e, HX_STR("</think>"));
    hx_sb json = { 0 };
    int32_t *more;
    int rc;

    *ids = NULL;
    hx_sb_str(&json, "{\"messages\":[{\"role\":\"user\",\"content\":");
    hx_json_put_str(&json, hx_str_c(text));
    hx_sb_str(&json, "}],\"add_generation_prompt\":true}");
    rc = json.bad ? hx_fail(err, HX_ENOMEM, "prompt: no memory")
                  : hx_render(e, (hx_str) { json.p, json.n }, NULL, ids, n, NULL, err);
    hx_sb_free(&json);
    if (rc != 0 || !closed || close < 0 || *n == 0 ||
        (*ids)[*n - 1] != hx_token_id(e, HX_STR("<think>")))
        return rc;
    if ((more = hx_new(int32_t, *n + 1)) == NULL) {
        hx_free(*ids);
        *ids = NULL;
        return hx_fail(err, HX_ENOMEM, "prompt: no memory");
    }
    memcpy(more, *ids, (size_t)*n * sizeof *more);
    hx_free(*ids);
    *ids = more;
    more[(*n)++] = close;
    return 0;
}

static void on_log(void *ud, int level, const char *line)
{
    (void)ud;
    if (level <= HX_LOG_WARN)
        fprintf(stderr, "hoist: %s%s\n", level == HX_LOG_WARN ? "warning: " : "", line);
}

/* The folder of the demo model: beside the program's build folder, or installed. */
static const char *demo_model(char *path, size_t cap)
{
    static const char *const places[] = { "/../models/demo-exl3",
                                          "/../../models/demo-exl3",
                                          "/../share/hoist/demo-exl3" };
    char exe[2048];
    const ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    char *slash;

    if (n > 0) {
        exe[n] = '\0';
        if ((slash = strrchr(exe, '/')) != NULL)
            *slash = '\0';
        for (size_t i = 0; i < HX_LEN(places); i++) {
            snprintf(path, cap, "%s%s", exe, places[i]);
            if (access(path, R_OK) == 0)
                return path;
        }
    }
    return "models/demo-exl3";
}

typedef struct {
    int64_t start_us, last_us;
    hx_load_fn *also;
    void *ud;
} load_view;

/* A bar when a person watches, else silence: loading ends with one line anyway. */
static void on_load(void *ud, uint64_t done, uint64_t total)
{
    load_view *v = ud;
    const int64_t now = hx_now_us();
    const int width = 30,
              full = total != 0 ? (int)((double)done / (double)total * width) : width;
    char a[32], b[32];

    if (v->also != NULL)
        v->also(v->ud, done, total);
    if (now - v->start_us < 300000 || (now - v->last_us < 100000 && done < total))
        return;
    v->last_us = now;
    cli_bytes(a, done);
    cli_bytes(b, total);
    if (done == total)
        cli_progress(" ");
    else
        cli_progress("loading %s of %s [%.*s%*s]", a, b, full,
                     "##############################", width - full, "");
}

/* Five times in microseconds, like "2,190,240,60,20". */
static bool read_costs(const char *s, float out[5])
{
    for (int i = 0; i < 5; i++) {
        char *end;

        out[i] = strtof(s, &end);
        if (end == s || *end != (i < 4 ? ',' : '\0') || !(out[i] >= 0 && out[i] < 1e9f))
            return false;
        s = end + 1;
    }
    return true;
}

int cli_open_engine(hx_engine **out, const hx_cli *c, hx_load_fn *also, void *ud)
{
    load_view view = { .start_us = hx_now_us(), .also = also, .ud = ud };
    hx_options opt = { .model_dir = c->model,
                       .device = c->device,
                       .cpu_isa = c->isa,
                       .cpus = c->cpus,
                       .n_threads = (int32_t)c->threads,
                       .ctx_tokens = c->ctx,
                       .max_streams = (int32_t)c->streams,
                       .max_queue = c->queue,
                       .cache_bytes = c->cache,
                       .mode = c->mode,
                       .vram_bytes = c->vram,
                       .ram_bytes = c->ram,
                       .decode_share =
                           c->has_share ? (float)HX_MAX(c->decode_share, 0.01) : 0,
                       .no_canary = c->no_canary,
                       .client_streams = (int32_t)c->key_streams,
                       .client_queue = c->key_queue,
                       .dump_dir = c->dump_dir,
                       .record = c->record,
                       .trace = c->trace,
                       .verify_ms = c->verify_memory ? 60000 : 0,
                       .park_ram_bytes = c->park_ram,
                       .park_dir = c->park_dir,
                       .park_disk_bytes = c->park_disk,
                       .on_load = on_load,
                       .on_load_ud = &view };
    hx_err err = { 0 };

    if (c->kv != NULL) {
        static const char *const names[] = {
            [HX_KV_BF16] = "bf16", [HX_KV_F32] = "f32", [HX_KV_FP8] = "fp8"
        };
        size_t i = 0;

        while (i < HX_LEN(names) && strcmp(c->kv, names[i]) != 0)
            i++;
        if (i == HX_LEN(names)) {
            fprintf(stderr, "hoist: kv \"%.40s\": expected bf16, fp8 or f32\n", c->kv);
            return 2;
        }
        opt.kv = (hx_kv)i;
    }
    if (c->expert_us != NULL && !read_costs(c->expert_us, opt.expert_us)) {
        fprintf(stderr,
                "hoist: --expert-us: \"%.60s\", expected five numbers like "
                "2,190,240,60,20\n",
                c->expert_us);
        return 2;
    }
    if (c->prefix != NULL)
        opt.prefix = strcmp(c->prefix, "off") == 0      ? HX_PREFIX_OFF
                     : strcmp(c->prefix, "strict") == 0 ? HX_PREFIX_STRICT
                                                        : HX_PREFIX_REUSE;
    if (hx_open(out, &opt, &err) != 0)
        return cli_fail(&err);
    return 0;
}

/* A file opened later must not become standard output or error: closed ones are taken, by
 * what cannot be written to, so that output lost there is noticed. */
static void open_standard(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 &&
            open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) < 0)
            return;
}

/* Weights are read where their file lies. It dies of this again when the handler is through. */
static void on_bus_error(int sig)
{
    static const char why[] =
        "hoist: a file in use became shorter, or its disk cannot be read\n";

    (void)sig;
    if (write(STDERR_FILENO, why, sizeof why - 1) < 0)
        return;
}

static int run_command(int argc, char **argv)
{
    const command *cmd = NULL;
    hx_cli c = { .port = 30000, .head_bits = 6, .calib_rows = 250, .calib_cols = 2048 };
    char demo[2100];
    hx_err err = { 0 };

    hx_on_log(on_log, NULL);
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        (argc == 2 && strcmp(argv[1], "help") == 0)) {
        print_usage(argc < 2 ? stderr : stdout);
        return argc < 2 ? 2 : 0;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("hoist %s\n", HX_VERSION);
        return 0;
    }
    if (strcmp(argv[1], "--man") == 0) {
        print_man();
        return 0;
    }
    c.help = strcmp(argv[1], "help") == 0 && argc > 2; /* hoist help COMMAND */
    for (size_t i = 0; i < HX_LEN(commands); i++)
        if (strcmp(commands[i].name, argv[c.help ? 2 : 1]) == 0)
            cmd = &commands[i];
    if (cmd == NULL) {
        fprintf(stderr, "hoist: no command \"%.60s\"; see hoist --help\n",
                argv[c.help ? 2 : 1]);
        return 2;
    }
    if (!c.help && parse(&c, cmd, argc, argv, &err) != 0) {
        cli_fail(&err);
        return 2;
    }
    if (c.help) {
        print_help(cmd);
        return 0;
    }
    const bool serves =
        cmd->bit == SERVE || (c.what != NULL && strcmp(c.what, "serve") == 0);
    c.no_canary = c.no_canary || !serves;
    if (c.prefix == NULL &&
        (cmd->bit == SCORE ||
         (cmd->bit == BENCH && !serves &&
          (c.what == NULL || strcmp(c.what, "decode") != 0 || c.tokens == NULL) &&
          (c.protocol == NULL || strcmp(c.protocol, "decode-32k") != 0))))
        c.prefix = "off"; /* what is measured is computed */
    if (c.prefix != NULL && strcmp(c.prefix, "reuse") != 0 &&
        strcmp(c.prefix, "strict") != 0 && strcmp(c.prefix, "off") != 0) {
        fprintf(stderr, "hoist: --prefix: \"%.40s\", expected reuse, strict or off\n",
                c.prefix);
        return 2;
    }
    if (c.park_disk > 0 && c.park_dir == NULL) {
        fprintf(stderr, "hoist: --park-disk without --park-dir, the folder it is for\n");
        return 2;
    }
    if ((cmd->bit & (SERVE | CHAT)) != 0 && c.prefix != NULL &&
        strcmp(c.prefix, "off") == 0 && (c.park_dir != NULL || c.park_ram > 0)) {
        fprintf(stderr, "hoist: --prefix off keeps nothing: leave out --park-dir and "
                        "--park-ram\n");
        return 2;
    }
    if (c.model == NULL && c.what != NULL && strcmp(c.what, "trace") == 0) {
        fprintf(
            stderr,
            "hoist: bench trace needs a FILE that serve or bench wrote with --trace\n");
        return 2;
    }
    if (c.model == NULL && c.pull == NULL && (cmd->bit & (SERVE | CHAT | BENCH)) != 0)
        c.model = demo_model(demo, sizeof demo);
    if (c.model == NULL && cmd->bit != CONNECT) {
        fprintf(stderr, "hoist: %s needs %s; see hoist %s --help\n", cmd->name,
                cmd->args[0] == '[' ? "a MODEL" : cmd->args, cmd->name);
        return 2;
    }
    return cmd->run(&c);
}

/* Of a pipe, like `| head`: then it is no fault that output is lost. */
static bool reader_has_left(void)
{
    struct pollfd out = { .fd = STDOUT_FILENO };

    return poll(&out, 1, 0) == 1 && (out.revents & POLLERR) != 0;
}

int main(int argc, char **argv)
{
    const struct sigaction bus = { .sa_handler = on_bus_error,
                                   .sa_flags = (int)SA_RESETHAND };
    int rc;

    open_standard();
    signal(SIGPIPE, SIG_IGN);
    sigaction(SIGBUS, &bus, NULL);
    rc = run_command(argc, argv);
    if ((fflush(stdout) != 0 || ferror(stdout)) && !reader_has_left()) {
        fprintf(stderr, "hoist: standard output: %s\n", strerror(errno));
        return rc != 0 ? rc : 1;
    }
    return rc;
}
