/* grammar_value.c - JSON values as grammar expressions: strings, numbers in a range,
 * given values, any value; and the formats of strings.
 *
 * Called by the schema front end and grammar.c. White space is at most one space behind
 * "," and ":". Numbers are bounded in length, so that a model cannot write digits for
 * ever: 19 digits before the point, 15 behind it, exponents of two digits. */
#include "text/grammar_ir.h"

enum { INT_DIGITS = 19, FRAC_DIGITS = 15 };

/* ---- strings --------------------------------------------------------- */

/* [lo, hi] of ASCII. */
static hx_ref ascii(hx_ir *ir, const char *ranges)
{
    hx_range r[8];
    size_t n = 0;

    for (; ranges[2 * n] != '\0'; n++)
        r[n] = (hx_range) { (uint8_t)ranges[2 * n], (uint8_t)ranges[2 * n + 1] };
    return hx_ir_set(ir, r, n, false);
}

/* A character of a string: itself, or an escape; surrogates only in pairs. */
static hx_ref text_char(hx_ir *ir)
{
    hx_range plain[] = { { ' ', '!' }, { '#', '[' }, { ']', 0x10ffff } };
    const hx_ref hex = ascii(ir, "09AFaf"), any2 = HX_SEQ(ir, hex, hex);
    const hx_ref d = ascii(ir, "DDdd");
    const hx_ref unit = HX_ALT(ir, HX_SEQ(ir, ascii(ir, "09ACEFacef"), hex),
                               HX_SEQ(ir, d, ascii(ir, "07")));
    const hx_ref pair = HX_SEQ(ir, d, ascii(ir, "89ABab"), any2, hx_ir_str(ir, "\\u"), d,
                               ascii(ir, "CFcf"));
    const hx_ref u = HX_SEQ(ir, hx_ir_str(ir, "u"), HX_ALT(ir, unit, pair), any2);

    return HX_ALT(ir, hx_ir_set(ir, plain, HX_LEN(plain), false),
                  HX_SEQ(ir, hx_ir_str(ir, "\\"),
                         HX_ALT(ir, ascii(ir, "\"\"\\\\//bbffnnrrtt"), u)));
}

static hx_ref quoted(hx_ir *ir, hx_ref inside)
{
    return HX_SEQ(ir, hx_ir_str(ir, "\""), inside, hx_ir_str(ir, "\""));
}

hx_ref hx_json_string(hx_ir *ir, uint32_t min, uint32_t max)
{
    if (ir->text_rule == 0) {
        const hx_ref c = text_char(ir);

        ir->text_rule = hx_ir_rule_of(ir, c);
        ir->string_rule = hx_ir_rule_of(
            ir, quoted(ir, hx_ir_rep(ir, c, 0, HX_IR_NO_END, HX_REP_EXPAND)));
        ir->word_rule = hx_ir_rule_of(
            ir, quoted(ir, hx_ir_rep(ir, c, 1, HX_IR_NO_END, HX_REP_EXPAND)));
    }
    if (min <= 1 && max == HX_IR_NO_END)
        return hx_ir_call(ir, min == 0 ? ir->string_rule : ir->word_rule);
    return quoted(ir,
                  hx_ir_rep(ir, hx_ir_call(ir, ir->text_rule), min, max, HX_REP_COUNT));
}

hx_ref hx_json_name(hx_ir *ir, hx_str name)
{
    hx_sb b = { 0 };
    hx_ref e;

    hx_json_put_str(&b, name);
    if (b.bad)
        hx_ir_fail(ir, HX_ENOMEM, "grammar: no memory for a name");
    e = ir->rc == 0 ? hx_ir_lit(ir, b.p + 1, b.n - 2) : HX_NONE;
    hx_sb_free(&b);
    return e;
}

hx_ref hx_json_comma(hx_ir *ir)
{
    return HX_SEQ(ir, hx_ir_str(ir, ","), hx_ir_opt(ir, hx_ir_str(ir, " ")));
}

hx_ref hx_json_colon(hx_ir *ir)
{
    return HX_SEQ(ir, hx_ir_str(ir, ":"), hx_ir_opt(ir, hx_ir_str(ir, " ")));
}

/* ---- any value ------------------------------------------------------- */

/* open [one {comma one}] close */
static hx_ref list_of(hx_ir *ir, const char *open, hx_ref one, const char *close)
{
    const hx_ref more =
        hx_ir_rep(ir, HX_SEQ(ir, hx_json_comma(ir), one), 0, HX_IR_NO_END, HX_REP_EXPAND);

    return HX_SEQ(ir, hx_ir_str(ir, open), hx_ir_opt(ir, HX_SEQ(ir, one, more)),
                  hx_ir_str(ir, close));
}

static void make_any(hx_ir *ir)
{
    const hx_str no_name = { NULL, 0 };
    const uint32_t value = hx_ir_rule_new(ir, no_name),
                   object = hx_ir_rule_new(ir, no_name),
                   array = hx_ir_rule_new(ir, no_name);
    const hx_ref string = hx_json_string(ir, 0, HX_IR_NO_END);
    const hx_ref member = HX_SEQ(ir, string, hx_json_colon(ir), hx_ir_call(ir, value));
    const hx_ref any = HX_ALT(ir, hx_ir_call(ir, object), hx_ir_call(ir, array), string,
                              hx_json_number(ir), hx_ir_str(ir, "true"),
                              hx_ir_str(ir, "false"), hx_ir_str(ir, "null"));
    const hx_ref all_object = list_of(ir, "{", member, "}");
    const hx_ref all_array = list_of(ir, "[", hx_ir_call(ir, value), "]");

    if (ir->rc != 0)
        return;
    ir->rule.p[value].body = any;
    ir->rule.p[object].body = all_object;
    ir->rule.p[array].body = all_array;
    ir->value_rule = value;
    ir->object_rule = object;
    ir->array_rule = array;
}

hx_ref hx_json_any(hx_ir *ir)
{
    if (ir->value_rule == 0)
        make_any(ir);
    return hx_ir_call(ir, ir->value_rule);
}

hx_ref hx_json_object(hx_ir *ir)
{
    if (ir->value_rule == 0)
        make_any(ir);
    return hx_ir_call(ir, ir->object_rule);
}

hx_ref hx_json_array(hx_ir *ir)
{
    if (ir->value_rule == 0)
        make_any(ir);
    return hx_ir_call(ir, ir->array_rule);
}

static hx_ref literal_members(hx_ir *ir, const hx_json *v)
{
    const bool object = hx_json_kind(v) == HX_JSON_OBJECT;
    hx_ref e = hx_ir_str(ir, object ? "{" : "[");

    for (size_t i = 0; i < hx_json_len(v) && ir->rc == 0; i++) {
        hx_str key = { NULL, 0 };
        const hx_json *one = object ? hx_json_member(v, i, &key) : hx_json_at(v, i);

        e = HX_SEQ(ir, e, i > 0 ? hx_json_comma(ir) : HX_EMPTY,
                   object
                       ? HX_SEQ(ir, quoted(ir, hx_json_name(ir, key)), hx_json_colon(ir))
                       : HX_EMPTY,
                   hx_json_literal(ir, one));
    }
    return HX_SEQ(ir, e, hx_ir_str(ir, object ? "}" : "]"));
}

hx_ref hx_json_literal(hx_ir *ir, const hx_json *v)
{
    hx_sb b = { 0 };
    hx_ref e;

    if (hx_json_kind(v) == HX_JSON_OBJECT || hx_json_kind(v) == HX_JSON_ARRAY)
        return literal_members(ir, v);
    hx_json_write(&b, v);
    if (b.bad)
        hx_ir_fail(ir, HX_ENOMEM, "grammar: no memory for a value");
    e = hx_ir_lit(ir, b.p, b.n);
    hx_sb_free(&b);
    return e;
}

/* ---- numbers --------------------------------------------------------- */

hx_ref hx_json_number(hx_ir *ir)
{
    return hx_regex_parse(ir,
                          HX_STR("-?(0|[1-9][0-9]{0,18})(\\.[0-9]{1,15})?"
                                 "([eE][+-]?[0-9]{1,2})?"),
                          false, false);
}

hx_ref hx_json_integer(hx_ir *ir)
{
    return hx_regex_parse(ir, HX_STR("-?(0|[1-9][0-9]{0,18})"), false, false);
}

bool hx_decimal_read(hx_ir *ir, hx_decimal *d, const hx_json *number)
{
    hx_sb b = { 0 };
    int exp = 0, sign = 1;
    bool point = false, ok = true;
    const char *p;

    *d = (hx_decimal) { 0 };
    hx_json_write(&b, number);
    if (b.bad || b.p == NULL)
        return hx_ir_fail(ir, HX_ENOMEM, "grammar: no memory for a number") == 0;
    p = b.p;
    d->negative = *p == '-';
    for (p += d->negative; *p == '.' || (*p >= '0' && *p <= '9'); p++) {
        if (*p == '.') {
            point = true;
            continue;
        }
        if (d->n > 0 || *p != '0') {
            ok &= d->n < (int)sizeof(d->digit);
            if (ok)
                d->digit[d->n++] = *p;
            d->exp += !point;
        } else {
            d->exp -= point;
        }
    }
    if (*p == 'e' || *p == 'E') {
        p++;
        sign = *p == '-' ? -1 : 1;
        for (p += *p == '-' || *p == '+'; *p >= '0' && *p <= '9'; p++)
            exp = HX_MIN(exp * 10 + (*p - '0'), 100000);
        d->exp += sign * exp;
    }
    while (d->n > 0 && d->digit[d->n - 1] == '0')
        d->n--;
    if (d->n == 0)
        *d = (hx_decimal) { 0 };
    hx_sb_free(&b);
    return ok;
}

int hx_decimal_cmp(const hx_decimal *a, const hx_decimal *b)
{
    const int flip = a->negative ? -1 : 1;
    int c;

    if (a->n == 0 || b->n == 0 || a->negative != b->negative) {
        const int x = a->n == 0 ? 0 : a->negative ? -1 : 1;
        const int y = b->n == 0 ? 0 : b->negative ? -1 : 1;

        return x - y;
    }
    if (a->exp != b->exp)
        return a->exp < b->exp ? -flip : flip;
    c = memcmp(a->digit, b->digit, (size_t)HX_MIN(a->n, b->n));
    return flip * (c != 0 ? c : a->n - b->n);
}

/* Non-negative numbers from lo to hi, written digit by digit. While the digits so far are
 * those of a bound, the bound is tight and limits the next one. */
typedef struct {
    hx_ir *ir;
    hx_decimal lo, hi;
    bool has_hi;
    int len; /* digits before the point, of the numbers at hand */
    int frac;
    uint32_t mod;
    hx_ref *rest; /* [mod][INT_MAX_DIGITS] free digits, by remainder and
                   * digits left; 0: not made */
    hx_ref digit[10];
} ranger;

enum { INT_MAX_DIGITS = 41 };

/* The digit at 10^-(pos + 1): pos 0 is right behind the point. */
static int digit_at(const hx_decimal *d, int pos)
{
    const int i = d->exp + pos;

    return i >= 0 && i < d->n ? d->digit[i] - '0' : 0;
}

/* Whether all digits from pos on are 0. */
static bool ends_at(const hx_decimal *d, int pos)
{
    return d->n == 0 || d->exp + pos >= d->n;
}

static hx_ref digits(hx_ir *ir, int lo, int hi)
{
    if (lo > hi)
        return HX_NONE;
    return hx_ir_set(ir, &(hx_range) { (uint32_t)('0' + lo), (uint32_t)('0' + hi) }, 1,
                     false);
}

static hx_ref any_digits(hx_ir *ir, int min, int max)
{
    return max < min ? HX_NONE
                     : hx_ir_rep(ir, digits(ir, 0, 9), (uint32_t)min, (uint32_t)max,
                                 HX_REP_EXPAND);
}

/* Whether the number may end before pos. */
static bool may_end(const ranger *r, int pos, bool tight_lo, bool tight_hi)
{
    if (tight_lo && (!ends_at(&r->lo, pos) || r->lo.strict))
        return false;
    return !tight_hi || !ends_at(&r->hi, pos) || !r->hi.strict;
}

/* n more digits before the point, any of them, to a multiple of mod. */
static hx_ref free_digits(ranger *r, uint32_t left, int n)
{
    hx_ir *ir = r->ir;
    hx_ref *go, way[10];

    if (r->mod == 1)
        return any_digits(ir, n, n);
    if (n == 0)
        return left == 0 ? HX_EMPTY : HX_NONE;
    go = &r->rest[left * INT_MAX_DIGITS + (uint32_t)n];
    if (*go == 0 && ir->rc == 0) {
        const uint32_t rule = hx_ir_rule_new(ir, (hx_str) { NULL, 0 });

        *go = hx_ir_goto(ir, rule);
        for (uint32_t d = 0; d < 10; d++)
            way[d] =
                HX_SEQ(ir, r->digit[d], free_digits(r, (left * 10 + d) % r->mod, n - 1));
        const hx_ref body = hx_ir_alt(ir, way, 10);
        if (ir->rc == 0)
            ir->rule.p[rule].body = body;
    }
    return *go;
}

static hx_ref free_fraction(const ranger *r, int pos)
{
    if (pos > 0)
        return any_digits(r->ir, 0, r->frac - pos);
    return hx_ir_opt(r->ir,
                     HX_SEQ(r->ir, hx_ir_str(r->ir, "."), any_digits(r->ir, 1, r->frac)));
}

/* What may stand from position pos on, given the remainder of what came before. */
static hx_ref digits_from(ranger *r, int pos, bool tight_lo, bool tight_hi, uint32_t left)
{
    hx_ir *ir = r->ir;
    const bool first = pos == -r->len && r->len > 1;
    int lo = first, hi = 9, n = 0;
    hx_ref way[5], end = HX_NONE;

    tight_lo &= !(pos >= 0 && ends_at(&r->lo, pos) && !r->lo.strict);
    if (ir->rc != 0)
        return HX_NONE;
    if (!tight_lo && !tight_hi && !first)
        return pos >= 0 ? (r->frac > 0 ? free_fraction(r, pos)
                           : left == 0 ? HX_EMPTY
                                       : HX_NONE)
                        : HX_SEQ(ir, free_digits(r, left, -pos),
                                 r->frac > 0 ? free_fraction(r, 0) : HX_EMPTY);
    if (pos >= 0 && left == 0 && may_end(r, pos, tight_lo, tight_hi))
        end = HX_EMPTY;
    if (pos >= r->frac)
        return end;
    if (tight_lo)
        lo = HX_MAX(lo, digit_at(&r->lo, pos));
    if (tight_hi)
        hi = HX_MIN(hi, digit_at(&r->hi, pos));
    for (int d = lo; d <= hi;) {
        const bool at_lo = tight_lo && d == lo, at_hi = tight_hi && d == hi;
        /* Digits that no bound touches go together, unless the remainder counts. */
        int last = at_lo || at_hi || r->mod > 1 ? d : tight_hi ? hi - 1 : hi;

        hx_ref e = HX_SEQ(ir, digits(ir, d, last),
                          digits_from(r, pos + 1, at_lo, at_hi,
                                      pos < 0 ? (left * 10 + (uint32_t)d) % r->mod : 0));
        if (n == (int)HX_LEN(way)) {
            way[0] = hx_ir_alt(ir, way, (size_t)n);
            n = 1;
        }
        way[n++] = e;
        d = last + 1;
    }
    const hx_ref next = hx_ir_alt(ir, way, (size_t)n);
    return HX_ALT(ir, end, pos == 0 ? HX_SEQ(ir, hx_ir_str(ir, "."), next) : next);
}

static int int_len(const hx_decimal *d)
{
    return HX_MAX(d->exp, 1);
}

static hx_ref magnitudes(ranger *r)
{
    const int from = int_len(&r->lo);
    const int to = r->has_hi ? int_len(&r->hi) : HX_MAX(from, INT_DIGITS);
    hx_ref all = HX_NONE;

    if (to >= INT_MAX_DIGITS)
        hx_ir_fail(r->ir, HX_EUNSUP, "schema: a bound of more than %d digits",
                   INT_MAX_DIGITS - 1);
    for (r->len = from; r->len <= to && r->ir->rc == 0; r->len++)
        all =
            HX_ALT(r->ir, all,
                   digits_from(r, -r->len, r->len == from, r->has_hi && r->len == to, 0));
    return all;
}

/* Numbers of one sign: from lo to hi, both as magnitudes. */
static hx_ref one_sign(hx_ir *ir, const hx_decimal *lo, const hx_decimal *hi, int frac,
                       uint32_t mod, hx_ref *rest)
{
    ranger r = { .ir = ir, .frac = frac, .mod = mod, .rest = rest, .has_hi = hi != NULL };

    for (int d = 0; d < 10; d++)
        r.digit[d] = digits(ir, d, d);
    if (lo != NULL)
        r.lo = *lo;
    if (hi != NULL)
        r.hi = *hi;
    r.lo.negative = r.hi.negative = false;
    if (hi != NULL && hx_decimal_cmp(&r.lo, &r.hi) > 0)
        return HX_NONE;
    return magnitudes(&r);
}

hx_ref hx_json_range(hx_ir *ir, const hx_decimal *lo, const hx_decimal *hi, int frac,
                     uint32_t mod)
{
    hx_refs rest = { 0 };
    const bool hi_below = hi != NULL && (hi->negative || (hi->n == 0 && hi->strict));
    hx_ref below = HX_NONE, above = HX_NONE;

    if (mod > 1 && !HX_PUSH(ir, rest, mod * INT_MAX_DIGITS))
        return HX_NONE;
    if (lo == NULL || lo->negative)
        below = HX_SEQ(ir, hx_ir_str(ir, "-"),
                       one_sign(ir, hi_below ? hi : NULL, lo, frac, mod, rest.p));
    if (!hi_below)
        above =
            one_sign(ir, lo != NULL && !lo->negative ? lo : NULL, hi, frac, mod, rest.p);
    HX_DROP(ir, rest);
    return HX_ALT(ir, above, below);
}

/* ---- formats --------------------------------------------------------- */

#define MONTH_DAY                                                                        \
    "((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|"          \
    "02-(0[1-9]|1\\d|2[0-8]))"
/* Years 1000 to 9999; 29 February in those that divide by 4, but for 100, but for 400. */
#define DATE                                                                             \
    "([1-9]\\d{3}-" MONTH_DAY "|([1-9]\\d(0[48]|[2468][048]|[13579][26])|"               \
    "([2468][048]|[13579][26])00)-02-29)"
#define TIME                                                                             \
    "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
#define LABEL  "[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
#define ATOM   "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
#define PCHAR  "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
#define OCTET  "(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define HEX(n) "[0-9A-Fa-f]{" #n "}"

const char *hx_json_format(hx_str name)
{
    static const struct {
        const char *name, *regex;
    } formats[] = {
        { "date", DATE },
        { "time", TIME },
        { "date-time", DATE "T" TIME },
        { "uuid", HEX(8) "-" HEX(4) "-" HEX(4) "-" HEX(4) "-" HEX(12) },
        { "email", ATOM "(\\." ATOM ")*@(" LABEL "\\.)+[A-Za-z]{2,24}" },
        { "hostname", "(" LABEL "\\.)*" LABEL },
        { "ipv4", "(" OCTET "\\.){3}" OCTET },
        { "uri",
          "[A-Za-z][A-Za-z0-9+.-]*:(//(" PCHAR "*|\\[[0-9A-Fa-f:.]+\\](:\\d{1,5})?)"
          "(/" PCHAR "*)*|/?" PCHAR "+(/" PCHAR "*)*)"
          "(\\?(" PCHAR "|[/?])*)?(#(" PCHAR "|[/?])*)?" },
    };

    for (size_t i = 0; i < HX_LEN(formats); i++)
        if (hx_str_is(name, formats[i].name))
            return formats[i].regex;
    return NULL;
}
