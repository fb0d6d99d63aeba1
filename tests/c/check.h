/* check.h: what every C test needs: tests that run themselves, and checks. */
#ifndef SHMS_CHECK_H
#define SHMS_CHECK_H
#include <stdio.h>
#include <stdlib.h>

#define CHECK(cond)                                                                                                    \
    do {                                                                                                               \
        if (!(cond)) {                                                                                                 \
            fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #cond);                                   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* With AddressSanitizer, or in an emulator, everything takes long: a part of the steps and rounds is tried. */
#if defined(__SANITIZE_ADDRESS__) || defined(__aarch64__)
enum { EACH = 4 };
#else
enum { EACH = 1 };
#endif

/* TEST(a_sentence) { ... }: the main function, which is in support.c, runs the tests of a file in their order. */
#define TEST(name)                                                                                                     \
    static void name(void);                                                                                            \
    __attribute__((constructor)) static void add_##name(void) { add_test(name); }                                      \
    static void name(void)
void add_test(void (*test)(void));
#endif
