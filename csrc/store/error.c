/* error.c - a message for each code of shmstore.h. */
#include "shmstore.h"

static const char *const texts[] = {
    [-SHMS_OK] = "done",
    [-SHMS_EINVAL] = "an argument is out of range",
    [-SHMS_ENOMEM] = "this process has no memory left",
    [-SHMS_ESYS] = "a system call failed",
    [-SHMS_ENOSPC] = "/dev/shm has no space for a segment of that size; make the store smaller or free space",
    [-SHMS_EFULL] = "the objects that are held leave no gap of that size; release objects or retry later",
    [-SHMS_ETOOLARGE] = "the object is larger than max_object_size",
    [-SHMS_EEXISTS] = "the key already exists in the storage",
    [-SHMS_ENOTFOUND] = "the key is not in the store",
    [-SHMS_ESTALE] = "the object has gone, or has been modified or is invalid",
    [-SHMS_ENOSTORE] = "no store has that name",
    [-SHMS_ESTOREEXISTS] = "a store of that name already exists; choose another name or recover it",
    [-SHMS_EWRITERACTIVE] = "the store has a live writer; close that writer first",
    [-SHMS_ERANKINUSE] = "a live reader has that rank; use another rank or close that reader",
    [-SHMS_ELAYOUT] = "the file is not a store of this version and architecture",
    [-SHMS_ECORRUPT] = "the tables of the store are inconsistent; create the store again",
    [-SHMS_ECLOSED] = "the handle is closed; open a new one",
    [-SHMS_EFORKED] = "the handle belongs to the parent process; open the store again after fork",
    [-SHMS_EOTHERSTORE] = "the name now names another store",
    [-SHMS_ENOSLOT] = "every slot has an object that is held; release objects or raise max_objects",
    [-SHMS_ENOLEASE] = "every lease entry has an open lease; read, release or cancel references",
    [-SHMS_ECREATING] = "the store is still being created; try again",
    [-SHMS_EFOREIGN] = "the store belongs to another user, or its mode lets other users open it",
    [-SHMS_ERANKS] = "the store has a different number of ranks",
    [-SHMS_EOPTIONS] = "the store was created with other options",
    [-SHMS_ESPARSE] = "the file of the store is sparse; a store has no holes",
    [-SHMS_EQUOTA] = "every object of the kind is held, and its quota is full; release objects or raise the quota",
    [-SHMS_EBUSY] = "the object is promised, but a stopped writer has not decided to keep it yet; try again",
};

const char *shms_strerror(int code) {
    unsigned at = 0u - (unsigned)code;
    return at < sizeof texts / sizeof *texts ? texts[at] : "not an error code of shmstore";
}
