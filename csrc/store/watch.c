/*
 * watch.c - tells when a store comes, without polling.
 *
 * An inotify watch on the folder. A file's creation is one event. The stamp, which ends the creation of a store, is a
 * store to memory and no event, so shms_segment_publish sets the file's times (IN_ATTRIB). Who starts the watch before
 * its first look misses nothing: a store that comes between the look and the wait has left an event.
 */
#include <errno.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "core.h"

int shms_watch(int *out, const char *folder) {
    *out = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    return *out >= 0 && inotify_add_watch(*out, folder, IN_CREATE | IN_MOVED_TO | IN_ATTRIB) >= 0 ? SHMS_OK : SHMS_ESYS;
}

void shms_watch_close(int *watch) {
    if (*watch >= 0)
        close(*watch);
    *watch = -1;
}

int shms_watch_read(int watch, const char *name) {
    union {
        struct inotify_event first;
        char bytes[4096];
    } events;
    int found = 0;
    for (;;) {
        ssize_t size = read(watch, events.bytes, sizeof events.bytes);
        if (size < 0 && errno != EAGAIN)
            return SHMS_ESYS;
        if (size <= 0)
            return found;
        for (ssize_t at = 0; at < size;) {
            const struct inotify_event *event = (const struct inotify_event *)(events.bytes + at);
            /* without a name: events were lost */
            found |= event->len == 0 || strcmp(event->name, name) == 0;
            at += (ssize_t)(sizeof *event + event->len);
        }
    }
}
