/*
 * superblock.c - libFuzzer's target for what is read of a file before anybody knows whose it is: all of it by read(2).
 *
 * An input is the size of a file, whether the check word is made right again, and patches of the superblock of a sound
 * store. The rest of the file is a hole. Nothing may crash, and nobody may open what is a hole.
 */
#include <fcntl.h>
#include <sys/stat.h>

#include "inspect/inspect.h"
#include "store/claims.h"
#include "support.h"

static shms_superblock sound;
static uint64_t sound_size;
static const char *name;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    shms_options o = {
        .capacity = 8192, .n_readers = 3, .max_objects = 6, .n_writers = 2, .n_groups = 2, .group_sizes = {1, 2}};
    shms_writer *w;
    name = store_name("superblock");
    CHECK_EQ(SHMS_OK, shms_writer_create(&w, name, &o));
    memcpy(&sound, w->seg.sb, sizeof sound);
    sound_size = w->seg.layout.file_size;
    CHECK_EQ(SHMS_OK, shms_writer_close(w, 1));
    shms_writer_free(w);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 3)
        return -1;
    shms_superblock sb = sound;
    uint64_t at, length = data[0] & 1 ? sound_size : (uint64_t)data[1] << (data[2] % 40);
    bool checks = data[0] & 2;
    for (data += 3, size -= 3; size >= 3; data += at, size -= at) { /* offset, length - 1, bytes */
        uint64_t offset = (data[0] | (uint64_t)data[1] << 8) % sizeof sb, n = 1 + data[2] % 8;
        data += 3, size -= 3;
        at = n < size ? n : size;
        memcpy((uint8_t *)&sb + offset, data, at < sizeof sb - offset ? at : sizeof sb - offset);
    }
    if (checks)
        sb.check = shms_layout_check(&sb);
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK_EQ((ssize_t)sizeof sb, pwrite(fd, &sb, sizeof sb, 0));
    CHECK_EQ(0, ftruncate(fd, (off_t)length));
    shms_probe p;
    shms_inspector *i;
    shms_writer *w;
    shms_reader *r;
    CHECK_EQ(SHMS_OK, shms_probe_file(&p, name));
    CHECK(!p.same_version || p.fault);
    CHECK_EQ(0, shms_reader_pid(name, data[-1]));
    CHECK(shms_inspector_open(&i, name, SHMS_OWN_UID) < 0);
    CHECK(shms_reader_attach(&r, name, 0, NULL) < 0);
    CHECK(shms_writer_recover(&w, name, NULL) < 0 && shms_writer_join(&w, name, SHMS_ANY_ARENA, NULL) < 0);
    struct stat st;
    CHECK(fstat(fd, &st) == 0 && st.st_blocks <= 8); /* no hole was filled */
    close(fd);
    CHECK(p.size == 0 || shms_segment_remove(name, p.device, p.inode, p.size, 0) == SHMS_OK);
    shm_unlink(name);
    return 0;
}
