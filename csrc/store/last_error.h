/*
 * last_error.h - the text for an error code: what was wrong, what was expected, what to do. Each thread has its own.
 *
 * A call that returns one of the codes of shms_last_error returns what shms_fail returns.
 */
#ifndef SHMS_LAST_ERROR_H
#define SHMS_LAST_ERROR_H

/* Sets the text of shms_last_error, and returns the code. */
int shms_fail(int code, const char *format, ...) __attribute__((cold, format(printf, 2, 3)));
#define SHMS_NO_OUT "a pointer to what the call returns is NULL: pass the address of a variable"
#define SHMS_NO_OPTIONS "the options are NULL: a store needs at least capacity and n_readers"
#define SHMS_RESERVED "`reserved` must be 0: set the struct to zeros, or its SHMS_..._DEFAULTS, before its fields"
#define SHMS_NO_REF "the reference is NULL: pass SHMS_REF_SIZE bytes"

#endif
