/* error.c - a message for each code of shmstore.h. */
#include "shmstore.h"

const char *shms_strerror(int code) {
    switch (code) {
    case SHMS_OK:
        return "done";
    case SHMS_EINVAL:
        return "an argument is out of range";
    case SHMS_ENOMEM:
        return "out of private memory";
    case SHMS_ESYS:
        return "a system call failed";
    case SHMS_ENOSPC:
        return "the file system cannot hold a segment of that size";
    case SHMS_EFULL:
        return "what is held leaves no room";
    case SHMS_ETOOLARGE:
        return "the object is larger than the store allows";
    case SHMS_EEXISTS:
        return "the key already exists in the storage";
    case SHMS_ENOTFOUND:
        return "the key is not in the store";
    case SHMS_ESTALE:
        return "the object has gone, or has been modified or is invalid";
    case SHMS_ENOSTORE:
        return "no segment of that name";
    case SHMS_ESTOREEXISTS:
        return "a segment of that name exists";
    case SHMS_EWRITERACTIVE:
        return "the store's writer is alive";
    case SHMS_ERANKINUSE:
        return "the rank is in use";
    case SHMS_ELAYOUT:
        return "not a segment of this version, size and architecture";
    case SHMS_ECORRUPT:
        return "the segment's contents contradict themselves";
    case SHMS_ECLOSED:
        return "the handle is closed";
    case SHMS_EFORKED:
        return "the handle belongs to the parent process";
    case SHMS_EOTHERSTORE:
        return "the name is another store's";
    case SHMS_ENOSLOT:
        return "what is held leaves no slot";
    case SHMS_ENOLEASE:
        return "every lease entry is taken by an open lease";
    case SHMS_ECREATING:
        return "the segment's creation is not over";
    case SHMS_EFOREIGN:
        return "the segment is another user's, or others may open it";
    case SHMS_ERANKS:
        return "the store has another number of ranks";
    case SHMS_ESPARSE:
        return "parts of the segment's file are holes";
    default:
        return "unknown code";
    }
}
