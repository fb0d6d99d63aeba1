/* last_error.c - see last_error.h. */
#include <stdarg.h>
#include <stdio.h>

#include "last_error.h"
#include "shmstore.h"

static _Thread_local char text[512];

int shms_fail(int code, const char *format, ...) {
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return code;
}

const char *shms_last_error(void) { return text; }
