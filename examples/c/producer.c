/*
 * producer.c - a producer in C, whose tensors a reader in Python gets.
 *
 *     cc producer.c $(python -m shmstore.config --cflags --libs) -o producer
 *     ./producer frames
 *
 * It creates the store, or joins one that exists, and prints one line: the reference of a 2 x 3 tensor. When a line
 * comes on its standard input, it ends.
 */
#include <shmstore.h>
#include <stdio.h>
#include <string.h>

static int failed(const char *what, int code) {
    fprintf(stderr, "producer: %s: %s\n", what, shms_strerror(code));
    if (code == SHMS_ESYS)
        perror("producer");
    return 1;
}

static int open_store(shms_writer **w, const char *name) {
    shms_options options;
    memset(&options, 0, sizeof options);
    options.capacity = 1 << 20;
    options.n_readers = 1;
    int rc = shms_writer_create(w, name, &options);
    return rc == SHMS_ESTOREEXISTS ? shms_writer_join(w, name, SHMS_ANY_ARENA, NULL) : rc;
}

/* Stores the numbers 0 to 5 under the key, and writes them in place. */
static int put(shms_writer *w, const char *key, uint8_t *ref) {
    const uint64_t shape[] = {2, 3};
    char meta[SHMS_TENSOR_META], *payload;
    shms_object object;
    shms_uncommitted *uncommitted;

    memset(&object, 0, sizeof object);
    object.key = key;
    object.key_len = (uint32_t)strlen(key);
    object.meta = meta;
    object.meta_len = (uint32_t)shms_tensor_meta(meta, "<f4", shape, 2); /* "float32" for a torch.Tensor */
    object.payload_size = 6 * sizeof(float);

    int rc = shms_writer_begin(w, &object, &payload, &uncommitted);
    if (rc)
        return rc;
    for (int i = 0; i < 6; i++)
        ((float *)(void *)payload)[i] = (float)i;
    return shms_uncommitted_commit(uncommitted, ref);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: producer STORE\n");
        return 2;
    }
    shms_writer *w;
    int rc = open_store(&w, argv[1]);
    if (rc)
        return failed(argv[1], rc);

    uint8_t ref[SHMS_REF_SIZE];
    rc = put(w, "cat.jpg", ref);
    if (rc == SHMS_EEXISTS) /* from a run before: hand it out once more */
        rc = shms_writer_hit(w, "cat.jpg", 7, ref);
    if (rc == SHMS_OK) {
        for (int i = 0; i < SHMS_REF_SIZE; i++)
            printf("%02x", ref[i]);
        printf("\n");
        fflush(stdout);
        getchar(); /* the reader has it */
    }
    shms_writer_close(w, SHMS_AS_RECORDED); /* the last writer removes the store */
    shms_writer_free(w);
    return rc ? failed("put", rc) : 0;
}
