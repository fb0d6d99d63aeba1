/*
 * claims.c - see claims.h.
 */
#include "claims.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

#include "index.h"
#include "segment.h"

#define BYTES_AT (UINT64_C(1) << 61) /* behind the end of any file */

struct shms_claims {
    shms_segment file; /* opened and not mapped; a forked child does not keep it */
    uint64_t seed;
    pthread_mutex_t mutex; /* of the rest */
    uint32_t refs;         /* the handle and the claims */
    uint32_t n;
    struct {
        uint64_t byte, thread;
    } table[SHMS_MAX_CLAIMS];
};

static bool forked(const struct shms_claims *c) { return atomic_load_explicit(&c->file.forked, memory_order_relaxed); }

static uint64_t byte_of(const struct shms_claims *c, const char *key, uint32_t key_len) {
    return BYTES_AT + (shms_hash_key(c->seed, key, key_len) & (BYTES_AT / 2 - 1));
}

static int lock(const struct shms_claims *c, int what, int type, uint64_t byte) {
    struct flock fl = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};
    int rc = fcntl(c->file.fd, what, &fl);
    return what == F_OFD_GETLK && rc == 0 ? fl.l_type != F_UNLCK : rc;
}

/* Where in the table a byte is, or n. The mutex is held. */
static uint32_t place_of(const struct shms_claims *c, uint64_t byte) {
    uint32_t i = 0;
    while (i < c->n && c->table[i].byte != byte)
        i++;
    return i;
}

int shms_claims_open(shms_claims **out, const char *name, uint64_t store) {
    struct shms_claims *c = calloc(1, sizeof *c);
    if (!c)
        return SHMS_ENOMEM;
    c->refs = 1;
    c->file.fd = -1;
    pthread_mutex_init(&c->mutex, NULL);
    shms_superblock sb = {0};
    if (shms_segment_name(&c->file, name) == SHMS_OK && shms_segment_open_file(&c->file, O_RDWR, false, false) >= 0 &&
        (pread(c->file.fd, &sb, sizeof sb, 0) != sizeof sb || sb.store != store))
        shms_segment_close(&c->file); /* another store's by now */
    c->seed = sb.secret;
    *out = c;
    return SHMS_OK;
}

static void unref(struct shms_claims *c) {
    pthread_mutex_lock(&c->mutex);
    bool last = --c->refs == 0;
    pthread_mutex_unlock(&c->mutex);
    if (!last)
        return;
    shms_segment_close(&c->file);
    pthread_mutex_destroy(&c->mutex);
    free(c);
}

void shms_claims_drop(shms_claims **c) {
    if (*c && !forked(*c)) /* in a forked child, another thread of the parent may have had the mutex */
        unref(*c);
    *c = NULL;
}

int shms_claim_take(shms_claims *c, uint64_t thread, const char *key, uint32_t key_len, shms_claim *out) {
    if (forked(c))
        return SHMS_EFORKED;
    uint64_t byte = byte_of(c, key, key_len);
    pthread_mutex_lock(&c->mutex);
    bool granted = place_of(c, byte) == c->n;
    if (granted && c->n == SHMS_MAX_CLAIMS) {
        granted = lock(c, F_OFD_GETLK, F_RDLCK, byte) != 1;
        byte = 0;
    } else if (granted && lock(c, F_OFD_SETLK, F_WRLCK, byte) == 0) {
        c->table[c->n].byte = byte;
        c->table[c->n++].thread = thread;
    } else if (granted) {
        granted = errno != EAGAIN; /* else another process has it */
        byte = 0;
    }
    if (granted) {
        *out = (shms_claim){c, byte};
        c->refs++;
    }
    pthread_mutex_unlock(&c->mutex);
    return granted;
}

void shms_claim_end(shms_claim *claim) {
    struct shms_claims *c = __atomic_exchange_n(&claim->of, NULL, __ATOMIC_ACQ_REL);
    if (!c || forked(c))
        return;
    pthread_mutex_lock(&c->mutex);
    uint32_t at = claim->byte ? place_of(c, claim->byte) : c->n;
    if (at < c->n) {
        lock(c, F_OFD_SETLK, F_UNLCK, claim->byte);
        c->table[at] = c->table[--c->n];
    }
    pthread_mutex_unlock(&c->mutex);
    unref(c);
}

int shms_claimed(shms_claims *c, const char *key, uint32_t key_len) {
    if (forked(c))
        return SHMS_EFORKED;
    uint64_t byte = byte_of(c, key, key_len);
    pthread_mutex_lock(&c->mutex);
    bool claimed = place_of(c, byte) < c->n || lock(c, F_OFD_GETLK, F_RDLCK, byte) == 1;
    pthread_mutex_unlock(&c->mutex);
    return claimed;
}

uint32_t shms_claims_of(shms_claims *c, uint64_t thread) {
    uint32_t n = 0;
    if (forked(c))
        return 0;
    pthread_mutex_lock(&c->mutex);
    for (uint32_t i = 0; i < c->n; i++)
        n += c->table[i].thread == thread;
    pthread_mutex_unlock(&c->mutex);
    return n;
}
