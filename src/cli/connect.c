/* connect.c - the command that tells other programs about this server: prints a client's
 * configuration, or writes it after asking.
 *
 * One table holds what each client wants; docs/clients.md explains it. Asks the server
 * for the model's name and context, over plain HTTP. Never changes a file without an
 * answer from the person, never loses what was in it. */
#include <errno.h>
#include <netdb.h>
#include <pwd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <unistd.h>

#include "cli/cli.h"

/* ---- what each client wants ------------------------------------------- */

/* How a part gets into a file that is there already. */
typedef enum {
    PRINT, /* it is no file: settings of a window, lines of a shell */
    JSON,  /* members are merged */
    APPEND,
    CREATE /* only where there is none */
} part_kind;

typedef struct {
    part_kind kind;
    const char *path; /* below the home folder */
    const char *text; /* @URL@ @KEY@ @MODEL@ @CTX@ @OUT@ are filled in */
} part;

typedef struct {
    const char *name, *title;
    part part[2];
    const char *after; /* what to do then */
} client;

#define SHELL "in the shell that starts it"

static const client clients[] = {
    { "opencode",
      "opencode",
      { { JSON, ".config/opencode/opencode.json",
          "{\n"
          "  \"$schema\": \"https://opencode.ai/config.json\",\n"
          "  \"model\": \"hoist/@MODEL@\",\n"
          "  \"provider\": {\n"
          "    \"hoist\": {\n"
          "      \"npm\": \"@ai-sdk/openai-compatible\",\n"
          "      \"name\": \"Hoist\",\n"
          "      \"options\": { \"baseURL\": \"@URL@/v1\", \"apiKey\": \"@KEY@\" },\n"
          "      \"models\": {\n"
          "        \"@MODEL@\": {\n"
          "          \"name\": \"@MODEL@\", \"reasoning\": true, \"tool_call\": true,\n"
          "          \"limit\": { \"context\": @CTX@, \"output\": @OUT@ }\n"
          "        }\n"
          "      }\n"
          "    }\n"
          "  }\n"
          "}\n" } },
      "run opencode; /models switches back" },
    { "codex",
      "Codex CLI",
      { { APPEND, ".codex/config.toml",
          "[model_providers.hoist]\n"
          "name = \"Hoist\"\n"
          "base_url = \"@URL@/v1\"\n"
          "wire_api = \"responses\"\n"
          "http_headers = { \"Authorization\" = \"Bearer @KEY@\" }\n"
          "stream_idle_timeout_ms = 600000\n"
          "\n"
          "[profiles.hoist]\n"
          "model = \"@MODEL@\"\n"
          "model_provider = \"hoist\"\n"
          "model_context_window = @CTX@\n" } },
      "run codex --profile hoist" },
    { "claude-code",
      "Claude Code",
      { { JSON, ".claude/settings.json",
          "{\n"
          "  \"env\": {\n"
          "    \"ANTHROPIC_BASE_URL\": \"@URL@\",\n"
          "    \"ANTHROPIC_AUTH_TOKEN\": \"@KEY@\",\n"
          "    \"ANTHROPIC_MODEL\": \"@MODEL@\",\n"
          "    \"ANTHROPIC_DEFAULT_HAIKU_MODEL\": \"@MODEL@\",\n"
          "    \"ANTHROPIC_DEFAULT_SONNET_MODEL\": \"@MODEL@\",\n"
          "    \"ANTHROPIC_DEFAULT_OPUS_MODEL\": \"@MODEL@\",\n"
          "    \"API_TIMEOUT_MS\": \"3000000\",\n"
          "    \"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC\": \"1\"\n"
          "  }\n"
          "}\n" } },
      "run claude; the first prompt of about 25,000 tokens is the slow one" },
    { "cline",
      "Cline",
      { { PRINT, "its settings, API Provider \"OpenAI Compatible\"",
          "Base URL              @URL@/v1\n"
          "API Key               @KEY@\n"
          "Model ID              @MODEL@\n"
          "Context Window Size   @CTX@\n"
          "Supports Images       off\n" } },
      NULL },
    { "roo",
      "Roo Code, Kilo Code",
      { { PRINT, "their settings, API Provider \"OpenAI Compatible\"",
          "Base URL              @URL@/v1\n"
          "API Key               @KEY@\n"
          "Model                 @MODEL@\n"
          "Context Window Size   @CTX@\n"
          "Max Output Tokens     @OUT@\n"
          "Image Support         off\n" } },
      NULL },
    { "zed",
      "Zed",
      { { JSON, ".config/zed/settings.json",
          "{\n"
          "  \"language_models\": {\n"
          "    \"openai_compatible\": {\n"
          "      \"Hoist\": {\n"
          "        \"api_url\": \"@URL@/v1\",\n"
          "        \"available_models\": [\n"
          "          {\n"
          "            \"name\": \"@MODEL@\", \"display_name\": \"@MODEL@\",\n"
          "            \"max_tokens\": @CTX@, \"max_output_tokens\": @OUT@,\n"
          "            \"capabilities\": { \"tools\": true, \"images\": false,\n"
          "              \"parallel_tool_calls\": true, \"prompt_cache_key\": false }\n"
          "          }\n"
          "        ]\n"
          "      }\n"
          "    }\n"
          "  }\n"
          "}\n" },
        { PRINT, SHELL, "export HOIST_API_KEY=@KEY@\n" } },
      "choose the model in the agent panel" },
    { "aider",
      "Aider",
      { { CREATE, ".aider.conf.yml",
          "model: openai/@MODEL@\n"
          "openai-api-base: @URL@/v1\n"
          "openai-api-key: @KEY@\n" },
        { JSON, ".aider.model.metadata.json",
          "{\n"
          "  \"openai/@MODEL@\": {\n"
          "    \"max_input_tokens\": @CTX@, \"max_output_tokens\": @OUT@,\n"
          "    \"input_cost_per_token\": 0, \"output_cost_per_token\": 0,\n"
          "    \"litellm_provider\": \"openai\", \"mode\": \"chat\"\n"
          "  }\n"
          "}\n" } },
      "run aider" },
    { "continue",
      "Continue",
      { { CREATE, ".continue/config.yaml",
          "name: Hoist\n"
          "version: 1.0.0\n"
          "schema: v1\n"
          "models:\n"
          "  - name: @MODEL@\n"
          "    provider: openai\n"
          "    model: @MODEL@\n"
          "    apiBase: @URL@/v1\n"
          "    apiKey: @KEY@\n"
          "    roles: [chat, edit, apply]\n"
          "    capabilities: [tool_use]\n"
          "    defaultCompletionOptions:\n"
          "      contextLength: @CTX@\n"
          "      maxTokens: @OUT@\n"
          "  - name: @MODEL@ (autocomplete)\n"
          "    provider: openai\n"
          "    model: @MODEL@\n"
          "    apiBase: @URL@/v1\n"
          "    apiKey: @KEY@\n"
          "    useLegacyCompletionsEndpoint: true\n"
          "    roles: [autocomplete]\n" } },
      NULL },
    { "open-webui",
      "Open WebUI",
      { { PRINT, SHELL " (a container reaches this machine as host.docker.internal)",
          "export OPENAI_API_BASE_URL=@URL@/v1\n"
          "export OPENAI_API_KEY=@KEY@\n" } },
      "or: Admin Panel, Settings, Connections, OpenAI API" },
    { "litellm",
      "LiteLLM proxy",
      { { CREATE, "litellm.yaml",
          "model_list:\n"
          "  - model_name: @MODEL@\n"
          "    litellm_params:\n"
          "      model: openai/@MODEL@\n"
          "      api_base: @URL@/v1\n"
          "      api_key: @KEY@\n"
          "      timeout: 3600\n"
          "    model_info:\n"
          "      max_input_tokens: @CTX@\n"
          "      max_output_tokens: @OUT@\n"
          "      supports_function_calling: true\n" } },
      "run litellm --config ~/litellm.yaml" },
    { "openai",
      "OpenAI SDK",
      { { PRINT, SHELL,
          "export OPENAI_BASE_URL=@URL@/v1\n"
          "export OPENAI_API_KEY=@KEY@\n" },
        { PRINT, "Python; timeout is in seconds",
          "client = openai.OpenAI(base_url=\"@URL@/v1\", api_key=\"@KEY@\", "
          "timeout=3600)\n"
          "client.chat.completions.create(model=\"@MODEL@\", messages=[...])\n" } },
      NULL },
    { "anthropic",
      "Anthropic SDK",
      { { PRINT, SHELL,
          "export ANTHROPIC_BASE_URL=@URL@\n"
          "export ANTHROPIC_API_KEY=@KEY@\n" },
        { PRINT, "Python; timeout is in seconds",
          "client = anthropic.Anthropic(base_url=\"@URL@\", api_key=\"@KEY@\", "
          "timeout=3600)\n"
          "client.messages.create(model=\"@MODEL@\", max_tokens=@OUT@, "
          "messages=[...])\n" } },
      NULL },
};

/* ---- the server --------------------------------------------------------- */

typedef struct {
    char url[256], host[128], port[8], path[128]; /* path: before /v1 */
    char key[256], model[128];
    int64_t ctx;
    bool tls;
} server;

static int parse_url(server *s, const char *url, hx_err *err)
{
    const char *p = strstr(url, "://");
    size_t n = strlen(url), host;

    s->tls = strncmp(url, "https://", 8) == 0;
    while (n > 0 && url[n - 1] == '/')
        n--;
    if (n > 3 && strncmp(url + n - 3, "/v1", 3) == 0)
        n -= 3;
    if (p == NULL || (!s->tls && strncmp(url, "http://", 7) != 0) || n >= sizeof s->url ||
        strpbrk(url, "\"\\ '\n") != NULL)
        return hx_fail(err, HX_EARG, "--url: \"%.80s\", expected http://HOST:PORT", url);
    snprintf(s->url, sizeof s->url, "%.*s", (int)n, url);
    p = s->url + (p + 3 - url);
    host = *p == '[' ? strcspn(p, "]") + 1 : strcspn(p, ":/");
    if (host < 1 || host >= sizeof s->host || (*p == '[' && p[host - 1] != ']'))
        return hx_fail(err, HX_EARG, "--url: \"%.80s\" has no host", url);
    snprintf(s->host, sizeof s->host, "%.*s", (int)(*p == '[' ? host - 2 : host),
             *p == '[' ? p + 1 : p);
    p += host;
    snprintf(s->port, sizeof s->port, "%.*s", (int)(*p == ':' ? strcspn(p + 1, "/") : 2),
             *p == ':' ? p + 1 : "80");
    snprintf(s->path, sizeof s->path, "%s", p + strcspn(p, "/"));
    return 0;
}

static int dial(const server *s)
{
    const struct addrinfo hint = { .ai_socktype = SOCK_STREAM };
    const struct timeval limit = { .tv_sec = 3 };
    struct addrinfo *all = NULL;
    int fd = -1;

    if (getaddrinfo(s->host, s->port, &hint, &all) != 0)
        return -1;
    for (const struct addrinfo *a = all; a != NULL && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (fd < 0)
            continue;
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
        if (connect(fd, a->ai_addr, a->ai_addrlen) != 0) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(all);
    return fd;
}

/* The body of GET /v1/models; false where there is none. HTTP/1.0 has no chunks. */
static bool get_models(const server *s, hx_sb *body)
{
    hx_sb b = { .max = 1 << 20 };
    char buf[4096];
    const char *head;
    ssize_t n;
    const int fd = dial(s);

    if (fd < 0)
        return false;
    hx_sb_printf(&b,
                 "GET %s/v1/models HTTP/1.0\r\nHost: %s\r\nAuthorization: Bearer %s"
                 "\r\n\r\n",
                 s->path, s->host, s->key);
    n = send(fd, b.p, b.n, MSG_NOSIGNAL);
    b.n = 0;
    while (n > 0 && (n = recv(fd, buf, sizeof buf, 0)) > 0)
        hx_sb_add(&b, buf, (size_t)n);
    close(fd);
    head = b.n > 12 ? strstr(b.p, "\r\n\r\n") : NULL;
    if (head != NULL && strncmp(b.p + 8, " 200", 4) == 0)
        hx_sb_str(body, head + 4);
    hx_sb_free(&b);
    return body->n > 0;
}

/* Names go into JSON, YAML, TOML and shells: what would need quoting there is refused. */
static bool is_plain(const char *s)
{
    for (; *s != '\0'; s++)
        if (*s <= ' ' || *s > '~' || strchr("\"'\\`$&|;<>(){}#", *s) != NULL)
            return false;
    return true;
}

static int ask_server(server *s, const hx_cli *c, hx_err *err)
{
    hx_sb body = { 0 };
    hx_json *list = NULL;

    s->ctx = c->ctx > 0 ? c->ctx : 131072;
    snprintf(s->model, sizeof s->model, "%s",
             c->served_name != NULL ? c->served_name : "glm-5.3-flash");
    if (!s->tls && get_models(s, &body) &&
        hx_json_parse(&list, (hx_str) { body.p, body.n }, 0, NULL) == 0) {
        const hx_json *m = hx_json_at(hx_json_get(list, "data"), 0);
        const hx_str id = hx_json_str(hx_json_get(m, "id"));

        if (c->served_name == NULL && id.n > 0)
            snprintf(s->model, sizeof s->model, "%.*s", (int)HX_MIN(id.n, 120u), id.p);
        if (c->ctx == 0)
            s->ctx = hx_json_int(hx_json_get(m, "max_model_len"), s->ctx);
    } else {
        fprintf(stderr,
                "hoist: no list of models from %s%s; the model's name and context below "
                "are guesses (--served-name, --ctx)\n",
                s->url, s->tls ? " (it is not asked over TLS)" : "");
    }
    hx_json_free(list);
    hx_sb_free(&body);
    if (!is_plain(s->model) || !is_plain(s->key))
        return hx_fail(err, HX_EARG,
                       "the model's name or the key has characters that configuration "
                       "files would have to quote; --served-name gives another name");
    return 0;
}

/* ---- filling in and writing --------------------------------------------- */

static void fill(hx_sb *b, const server *s, const char *text)
{
    char ctx[24], out[24];
    const struct {
        const char *mark, *value;
    } marks[] = { { "@URL@", s->url },
                  { "@KEY@", s->key },
                  { "@MODEL@", s->model },
                  { "@CTX@", ctx },
                  { "@OUT@", out } };

    snprintf(ctx, sizeof ctx, "%lld", (long long)s->ctx);
    snprintf(out, sizeof out, "%lld", (long long)HX_MIN(s->ctx / 4, 32768));
    while (*text != '\0') {
        size_t i = 0;

        while (i < HX_LEN(marks) &&
               strncmp(text, marks[i].mark, strlen(marks[i].mark)) != 0)
            i++;
        if (i < HX_LEN(marks)) {
            hx_sb_str(b, marks[i].value);
            text += strlen(marks[i].mark);
        } else {
            hx_sb_char(b, *text++);
        }
    }
}

/* Members of both; where both have one, objects are merged and mine wins else. */
static void merge(hx_sb *b, const hx_json *theirs, const hx_json *mine, int indent)
{
    bool first = true;
    hx_str key;

    hx_sb_str(b, "{");
    for (int side = 0; side < 2; side++) {
        const hx_json *from = side == 0 ? theirs : mine;

        for (size_t i = 0; i < hx_json_len(from); i++) {
            const hx_json *v = hx_json_member(from, i, &key);
            const hx_json *other = hx_json_get(side == 0 ? mine : theirs, key.p);

            if (side == 1 && hx_json_has(theirs, key.p))
                continue;
            hx_sb_printf(b, "%s\n%*s", first ? "" : ",", indent + 2, "");
            first = false;
            hx_json_put_str(b, key);
            hx_sb_str(b, ": ");
            if (hx_json_kind(v) == HX_JSON_OBJECT &&
                (other == NULL || hx_json_kind(other) == HX_JSON_OBJECT))
                merge(b, side == 0 ? v : NULL, side == 0 ? other : v, indent + 2);
            else
                hx_json_write(b, other != NULL ? other : v);
        }
    }
    if (!first)
        hx_sb_printf(b, "\n%*s", indent, "");
    hx_sb_str(b, "}");
}

static int merge_text(hx_sb *out, hx_str theirs, hx_str mine, const char *path,
                      hx_err *err)
{
    hx_json *a = NULL, *b = NULL;
    hx_sb same = { 0 };
    int rc = hx_json_parse(&a, theirs, 0, NULL);

    if (rc == 0 && hx_json_kind(a) != HX_JSON_OBJECT)
        rc = HX_EFORMAT;
    if (rc != 0)
        rc =
            hx_fail(err, HX_EFORMAT,
                    "%s: has comments or is no JSON object; add the above by hand", path);
    else if ((rc = hx_json_parse(&b, mine, 0, err)) == 0) {
        merge(out, a, b, 0);
        merge(&same, a, NULL, 0);
        if (!same.bad && out->n == same.n && memcmp(out->p, same.p, same.n) == 0) {
            out->n = 0;
            hx_sb_add(out, theirs.p, theirs.n);
        } else {
            hx_sb_char(out, '\n');
        }
    }
    hx_sb_free(&same);
    hx_json_free(a);
    hx_json_free(b);
    return rc;
}

/* What the file shall hold. *was: what it holds, {NULL, 0} where there is none. */
static int compose(hx_sb *out, const part *p, const char *path, hx_str text, hx_str was,
                   hx_err *err)
{
    const char *mark = p->kind == APPEND ? "[model_providers.hoist]" : NULL;

    if (was.p == NULL) {
        hx_sb_add(out, text.p, text.n);
        return 0;
    }
    if (p->kind == JSON)
        return merge_text(out, was, text, path, err);
    if (memmem(was.p, was.n, text.p, text.n) != NULL) {
        hx_sb_add(out, was.p, was.n);
        return 0;
    }
    if (p->kind == CREATE || (mark != NULL && memmem(was.p, was.n, mark, strlen(mark))))
        return hx_fail(err, HX_EARG, "%s: is there already; change it by hand", path);
    hx_sb_add(out, was.p, was.n);
    hx_sb_str(out, "\n");
    hx_sb_add(out, text.p, text.n);
    return 0;
}

static int save(const char *path, const hx_sb *b, hx_err *err)
{
    char dir[512];
    FILE *f;

    for (const char *slash = strchr(path + 1, '/'); slash != NULL;
         slash = strchr(slash + 1, '/')) {
        snprintf(dir, sizeof dir, "%.*s", (int)(slash - path), path);
        if (mkdir(dir, 0777) != 0 && errno != EEXIST)
            return hx_fail(err, HX_EIO, "%s: %s", dir, strerror(errno));
    }
    const mode_t before = umask(077); /* it may hold a key */
    f = fopen(path, "w");
    umask(before);
    if (f == NULL)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    const bool ok = fwrite(b->p, 1, b->n, f) == b->n;
    if (fclose(f) != 0 || !ok)
        return hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    return 0;
}

static bool ask(const char *path, bool there)
{
    char line[16] = "";

    fprintf(stderr,
            there ? "change %s? (the old one is kept as .bak) [y/N] "
                  : "write %s? [y/N] ",
            path);
    return fgets(line, sizeof line, stdin) != NULL && (line[0] == 'y' || line[0] == 'Y');
}

static int write_part(const part *p, const char *home, hx_str text, hx_err *err)
{
    char path[400], old[410], fresh[410];
    hx_sb out = { 0 };
    char *was = NULL;
    size_t n = 0;
    int rc = 0;

    if (snprintf(path, sizeof path, "%s/%s", home, p->path) >= (int)sizeof path)
        return hx_fail(err, HX_EARG, "--home: %zu bytes, at most %zu", strlen(home),
                       sizeof path - strlen(p->path) - 2);
    snprintf(old, sizeof old, "%s.bak", path);
    snprintf(fresh, sizeof fresh, "%s.new", path);
    if (hx_file_exists(path) && (rc = hx_file_read(path, 1 << 24, &was, &n, err)) != 0)
        return rc;
    if ((rc = compose(&out, p, path, text, (hx_str) { was, n }, err)) != 0)
        goto fail;
    if (out.bad) {
        rc = hx_fail(err, HX_ENOMEM, "%s: no memory", path);
        goto fail;
    }
    if (was != NULL && out.n == n && memcmp(out.p, was, n) == 0) {
        fprintf(stderr, "%s: has it already\n", path); /* and .bak what was before */
        goto fail;
    }
    if (!ask(path, was != NULL)) {
        fprintf(stderr, "left as it is\n");
        goto fail;
    }
    if ((rc = save(fresh, &out, err)) != 0)
        goto fail;
    if ((was != NULL && rename(path, old) != 0) || rename(fresh, path) != 0)
        rc = hx_fail(err, HX_EIO, "%s: %s", path, strerror(errno));
    else
        fprintf(stderr, "written\n");
fail:
    hx_free(was);
    hx_sb_free(&out);
    return rc;
}

static int show(const client *k, const server *s, const hx_cli *c, const char *home,
                hx_err *err)
{
    int rc = 0;

    printf("# %s\n", k->title);
    for (size_t i = 0; i < HX_LEN(k->part) && k->part[i].text != NULL && rc == 0; i++) {
        const part *p = &k->part[i];
        hx_sb text = { 0 };

        fill(&text, s, p->text);
        printf("# %s%s:\n%s", p->kind == PRINT ? "" : "~/", p->path, text.p);
        fflush(stdout);
        if (text.bad)
            rc = hx_fail(err, HX_ENOMEM, "connect: no memory");
        else if (c->write && p->kind != PRINT)
            rc = write_part(p, home, (hx_str) { text.p, text.n }, err);
        hx_sb_free(&text);
    }
    if (rc == 0 && k->after != NULL)
        printf("# then: %s\n", k->after);
    return rc;
}

int cmd_connect(const hx_cli *c)
{
    const struct passwd *me = getpwuid(getuid());
    const char *home = c->home != NULL ? c->home : me != NULL ? me->pw_dir : ".";
    const client *k = NULL;
    server s = { 0 };
    hx_err err = { 0 };

    for (size_t i = 0; i < HX_LEN(clients) && c->what != NULL; i++)
        if (strcmp(clients[i].name, c->what) == 0)
            k = &clients[i];
    if (k == NULL) {
        if (c->what != NULL)
            fprintf(stderr, "hoist: connect: no client \"%.60s\"; there are", c->what);
        else
            fprintf(stderr, "hoist: connect needs a CLIENT:");
        for (size_t i = 0; i < HX_LEN(clients); i++)
            fprintf(stderr, " %s", clients[i].name);
        fprintf(stderr, "\n");
        return 2;
    }
    snprintf(s.key, sizeof s.key, "%s", c->api_keys.n > 0 ? c->api_keys.p[0] : "none");
    if (parse_url(&s, c->url != NULL ? c->url : "http://127.0.0.1:30000", &err) != 0 ||
        ask_server(&s, c, &err) != 0 || show(k, &s, c, home, &err) != 0)
        return cli_fail(&err);
    return 0;
}
