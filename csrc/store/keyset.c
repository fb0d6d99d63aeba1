/* keyset.c - see keyset.h.  Its keys are the caller's own, so that the hash needs no secret seed. */
#include "keyset.h"

#include <stdlib.h>
#include <string.h>

#include "index.h"

struct shms_kept_key {
    shms_kept_key *next; /* of the bucket */
    uint32_t times, len;
    char text[];
};

static shms_kept_key **bucket_of(const shms_keyset *k, const char *key, uint32_t len) {
    return &k->buckets[shms_hash_key(0, key, len) & (k->n_buckets - 1)];
}

/* The link to the key's entry, or the one at the end of its bucket. */
static shms_kept_key **find(const shms_keyset *k, const char *key, uint32_t len) {
    shms_kept_key **link = bucket_of(k, key, len);
    while (*link && ((*link)->len != len || memcmp((*link)->text, key, len) != 0))
        link = &(*link)->next;
    return link;
}

static bool grow(shms_keyset *k) {
    shms_keyset grown = {.n_buckets = k->n_buckets ? 2 * k->n_buckets : 16, .count = k->count};
    grown.buckets = calloc(grown.n_buckets, sizeof *grown.buckets);
    if (!grown.buckets)
        return false;
    for (uint32_t i = 0; i < k->n_buckets; i++)
        for (shms_kept_key *entry = k->buckets[i], *next; entry; entry = next) {
            shms_kept_key **link = bucket_of(&grown, entry->text, entry->len);
            next = entry->next;
            entry->next = *link;
            *link = entry;
        }
    free(k->buckets);
    *k = grown;
    return true;
}

bool shms_keyset_add(shms_keyset *k, const char *key, uint32_t len) {
    if (k->count == k->n_buckets && !grow(k))
        return false;
    shms_kept_key **link = find(k, key, len);
    if (!*link) {
        shms_kept_key *entry = malloc(sizeof *entry + len);
        if (!entry)
            return false;
        *entry = (shms_kept_key){.len = len};
        memcpy(entry->text, key, len);
        *link = entry;
        k->count++;
    }
    (*link)->times++;
    return true;
}

bool shms_keyset_remove(shms_keyset *k, const char *key, uint32_t len) {
    shms_kept_key **link = k->count ? find(k, key, len) : NULL, *entry = link ? *link : NULL;
    if (!entry || --entry->times)
        return false;
    *link = entry->next;
    free(entry);
    k->count--;
    return true;
}

bool shms_keyset_has(const shms_keyset *k, const char *key, uint32_t len) { return k->count && *find(k, key, len); }

void shms_keyset_free(shms_keyset *k) {
    for (uint32_t i = 0; i < k->n_buckets; i++)
        for (shms_kept_key *entry = k->buckets[i], *next; entry; entry = next) {
            next = entry->next;
            free(entry);
        }
    free(k->buckets);
}
