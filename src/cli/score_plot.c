/* score_plot.c - the SVG of `hoist score`: divergence by position, and, for several models,
 * by their size. Called by score.c. Draws points, lines, axes and a legend; nothing more. */
#include <math.h>

#include "cli/score.h"

enum { WIDTH = 460, HEIGHT = 320, LEFT = 70, RIGHT = 34, TOP = 30, BOTTOM = 46 };

/* Where values lie on paper. Both axes are logarithmic: divergences and sizes are compared by
 * ratio. */
typedef struct {
    hx_sb *b;
    double x0, lo_x, hi_x, lo_y, hi_y;
} panel;

static const char *const colours[] = { "#1b6ca8", "#c8553d", "#3a7d44", "#8e5aa8",
                                       "#b8860b", "#2f8f9d", "#a23e6d", "#555555" };

static double at_x(const panel *p, double x)
{
    const double t = (log(x) - log(p->lo_x)) / (log(p->hi_x) - log(p->lo_x));

    return p->x0 + LEFT + t * (WIDTH - LEFT - RIGHT);
}

static double at_y(const panel *p, double y)
{
    const double t = (log(y) - log(p->lo_y)) / (log(p->hi_y) - log(p->lo_y));

    return HEIGHT - BOTTOM - t * (HEIGHT - TOP - BOTTOM);
}

static void text(hx_sb *b, double x, double y, const char *anchor, const char *s)
{
    hx_sb_printf(b, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
    for (; *s != '\0'; s++)
        if (*s == '<' || *s == '&')
            hx_sb_str(b, *s == '<' ? "&lt;" : "&amp;");
        else if ((unsigned char)*s >= 0x20)
            hx_sb_char(b, *s);
    hx_sb_str(b, "</text>\n");
}

static void stroke(hx_sb *b, double x1, double y1, double x2, double y2,
                   const char *colour)
{
    hx_sb_printf(
        b, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x1,
        y1, x2, y2, colour);
}

static void dot(hx_sb *b, double x, double y, const char *colour)
{
    hx_sb_printf(b, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3\" fill=\"%s\"/>\n", x, y,
                 colour);
}

/* Widens a range to decades below and above, so that every panel has two labelled lines. */
static void decades(double *lo, double *hi)
{
    *lo = pow(10, floor(log10(*lo)));
    *hi = pow(10, ceil(log10(*hi)));
    if (*hi <= *lo)
        *hi = *lo * 10;
}

static void axes(panel *p, const char *title, const char *x_name, double x_step)
{
    char label[32];

    text(p->b, p->x0 + WIDTH / 2.0, 18, "middle", title);
    text(p->b, p->x0 + WIDTH / 2.0, HEIGHT - 8, "middle", x_name);
    for (double y = p->lo_y; y < p->hi_y * 1.01; y *= 10) {
        snprintf(label, sizeof label, "%.0e", y);
        stroke(p->b, p->x0 + LEFT, at_y(p, y), p->x0 + WIDTH - RIGHT, at_y(p, y), "#ddd");
        text(p->b, p->x0 + LEFT - 6, at_y(p, y) + 4, "end", label);
    }
    for (double x = p->lo_x; x < p->hi_x * 1.01; x *= x_step) {
        if (x < 1e6)
            snprintf(label, sizeof label, "%.4g", x);
        else
            cli_bytes(label, (uint64_t)x);
        stroke(p->b, at_x(p, x), HEIGHT - BOTTOM, at_x(p, x), HEIGHT - BOTTOM + 5,
               "#444");
        text(p->b, at_x(p, x), HEIGHT - BOTTOM + 18, "middle", label);
    }
    stroke(p->b, p->x0 + LEFT, HEIGHT - BOTTOM, p->x0 + WIDTH - RIGHT, HEIGHT - BOTTOM,
           "#444");
    stroke(p->b, p->x0 + LEFT, TOP, p->x0 + LEFT, HEIGHT - BOTTOM, "#444");
}

static void stretch(double v, double *lo, double *hi)
{
    if (!(v > 0) || !isfinite(v))
        return;
    *lo = HX_MIN(*lo, v);
    *hi = HX_MAX(*hi, v);
}

static void by_position(hx_sb *b, const score_line *line, int n)
{
    panel p = { b, 0, 8, 16, INFINITY, 0 };
    score_bin bin[SCORE_BINS];

    for (int i = 0; i < n; i++) {
        const int n_bin = score_bins(bin, line[i].series);

        for (int k = 0; k < n_bin; k++)
            stretch(bin[k].kl, &p.lo_y, &p.hi_y);
        p.hi_x = HX_MAX(p.hi_x, n_bin > 0 ? (double)bin[n_bin - 1].to + 1 : 16);
    }
    if (!(p.hi_y > 0)) {
        text(b, WIDTH / 2.0, HEIGHT / 2.0, "middle", "no divergence anywhere");
        return;
    }
    decades(&p.lo_y, &p.hi_y);
    p.hi_y *= n > 3 ? 100 : 10; /* room for the legend */
    axes(&p, "Mean divergence by position, nats", "position", 4);
    for (int i = 0; i < n; i++) {
        const char *colour = colours[(size_t)i % HX_LEN(colours)];
        const int n_bin = score_bins(bin, line[i].series);
        double last_x = NAN, last_y = NAN;

        for (int k = 0; k < n_bin; k++) {
            if (!(bin[k].kl > 0))
                continue;
            const double x = at_x(&p, HX_MAX(bin[k].from * 1.414, 11.3)),
                         y = at_y(&p, bin[k].kl);

            dot(b, x, y, colour);
            if (!isnan(last_x))
                stroke(b, last_x, last_y, x, y, colour);
            last_x = x;
            last_y = y;
        }
        dot(b, LEFT + 14, TOP + 10 + 16 * i, colour);
        text(b, LEFT + 22, TOP + 14 + 16 * i, "start", line[i].name);
    }
}

static void by_size(hx_sb *b, const score_line *line, int n)
{
    panel p = { b, WIDTH, INFINITY, 0, INFINITY, 0 };

    for (int i = 0; i < n; i++) {
        stretch((double)line[i].bytes, &p.lo_x, &p.hi_x);
        stretch(line[i].kl.value, &p.lo_y, &p.hi_y);
        stretch(line[i].kl.lo, &p.lo_y, &p.hi_y);
        stretch(line[i].kl.hi, &p.lo_y, &p.hi_y);
    }
    if (!(p.hi_y > 0) || !(p.hi_x > 0))
        return;
    decades(&p.lo_y, &p.hi_y);
    p.lo_x = pow(2, floor(log2(p.lo_x)));
    p.hi_x = HX_MAX(pow(2, ceil(log2(p.hi_x))), p.lo_x * 2);
    axes(&p, "Mean divergence by size, nats", "bytes of weights", 2);
    for (int i = 0; i < n; i++) {
        const char *colour = colours[(size_t)i % HX_LEN(colours)];

        if (!(line[i].kl.value > 0))
            continue;
        const double x = at_x(&p, (double)line[i].bytes), y = at_y(&p, line[i].kl.value);

        if (line[i].kl.lo > 0)
            stroke(b, x, at_y(&p, line[i].kl.lo), x, at_y(&p, line[i].kl.hi), colour);
        dot(b, x, y, colour);
        text(b, x + 6, y - 6, x > WIDTH * 1.6 ? "end" : "start", line[i].name);
    }
}

int score_plot(const char *path, const score_line *line, int n, hx_err *err)
{
    hx_sb b = { 0 };
    int rc;

    hx_sb_printf(&b,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
                 "font-family=\"sans-serif\" font-size=\"11\">\n"
                 "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n",
                 n > 1 ? 2 * WIDTH : WIDTH, HEIGHT);
    by_position(&b, line, n);
    if (n > 1)
        by_size(&b, line, n);
    hx_sb_str(&b, "</svg>\n");
    rc = cli_write(path, &b, err);
    hx_sb_free(&b);
    return rc;
}
