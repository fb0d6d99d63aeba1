/*
 * keyset.h - keys that the writer keeps, each with the number of times: a hash table in private memory.
 */
#ifndef SHMS_KEYSET_H
#define SHMS_KEYSET_H

#include <stdbool.h>
#include <stdint.h>

typedef struct shms_kept_key shms_kept_key;

typedef struct shms_keyset { /* all 0: empty */
    shms_kept_key **buckets;
    uint32_t n_buckets, count;
} shms_keyset;

/* Adds the key once more; false: there is no memory, and nothing has changed. */
bool shms_keyset_add(shms_keyset *k, const char *key, uint32_t len);
/* Takes it out once; true: that was the last time. */
bool shms_keyset_remove(shms_keyset *k, const char *key, uint32_t len);
bool shms_keyset_has(const shms_keyset *k, const char *key, uint32_t len);
void shms_keyset_free(shms_keyset *k);

#endif
