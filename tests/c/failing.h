/* failing.h - functions of libc in the place of the real ones, which they call: one of those calls may fail. */
#ifndef SHMS_TEST_FAILING_H
#define SHMS_TEST_FAILING_H

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static int64_t until_failure = -1; /* how many calls succeed first; -1: all */
static int failed;
static const char *only; /* the one function that may fail; NULL: each */
static int instead;      /* its errno; 0: the usual one */

static bool may_fail(const char *function, int why) {
    if (until_failure < 0 || (only && strcmp(only, function)) || until_failure-- > 0)
        return false;
    failed++;
    errno = instead ? instead : why;
    return true;
}
#define fails(why) may_fail(__func__, why)
#define REAL(name, type, ...)                                                                                          \
    static type (*real)(__VA_ARGS__);                                                                                  \
    if (!real)                                                                                                         \
    *(void **)&real = dlsym(RTLD_NEXT, #name)

#ifndef __SANITIZE_ADDRESS__ /* which has its own */
void *calloc(size_t n, size_t size) {
    REAL(calloc, void *, size_t, size_t);
    return fails(ENOMEM) ? NULL : real(n, size);
}
void *malloc(size_t size) {
    REAL(malloc, void *, size_t);
    return fails(ENOMEM) ? NULL : real(size);
}
void *realloc(void *old, size_t size) {
    REAL(realloc, void *, void *, size_t);
    return fails(ENOMEM) ? NULL : real(old, size);
}
#endif

#endif
