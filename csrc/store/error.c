/* error.c - a message for each code of shmstore.h. */
#include "shmstore.h"

const char *shms_strerror(int code) {
    switch (code) {
    case SHMS_OK:
        return "done";
    case SHMS_EINVAL:
        return "an argument is out of range";
    case SHMS_ENOMEM:
        return "this process has no memory left";
    case SHMS_ESYS:
        return "a system call failed";
    case SHMS_ENOSPC:
        return "/dev/shm has no space for a segment of that size; make the store smaller or free space";
    case SHMS_EFULL:
        return "the objects that are held leave no gap of that size; release objects or retry later";
    case SHMS_ETOOLARGE:
        return "the object is larger than max_object_size";
    case SHMS_EEXISTS:
        return "the key already exists in the storage";
    case SHMS_ENOTFOUND:
        return "the key is not in the store";
    case SHMS_ESTALE:
        return "the object has gone, or has been modified or is invalid";
    case SHMS_ENOSTORE:
        return "no store has that name";
    case SHMS_ESTOREEXISTS:
        return "a store of that name already exists; choose another name or recover it";
    case SHMS_EWRITERACTIVE:
        return "the store has a live writer; close that writer first";
    case SHMS_ERANKINUSE:
        return "a live reader has that rank; use another rank or close that reader";
    case SHMS_ELAYOUT:
        return "the file is not a store of this version and architecture";
    case SHMS_ECORRUPT:
        return "the tables of the store are inconsistent; create the store again";
    case SHMS_ECLOSED:
        return "the handle is closed; open a new one";
    case SHMS_EFORKED:
        return "the handle belongs to the parent process; open the store again after fork";
    case SHMS_EOTHERSTORE:
        return "the name now names another store";
    case SHMS_ENOSLOT:
        return "every slot has an object that is held; release objects or raise max_objects";
    case SHMS_ENOLEASE:
        return "every lease entry has an open lease; read, release or cancel references";
    case SHMS_ECREATING:
        return "the store is still being created; try again";
    case SHMS_EFOREIGN:
        return "the store belongs to another user, or its mode lets other users open it";
    case SHMS_ERANKS:
        return "the store has a different number of ranks";
    case SHMS_EOPTIONS:
        return "the store was created with other options";
    case SHMS_ESPARSE:
        return "the file of the store is sparse; a store has no holes";
    case SHMS_EQUOTA:
        return "every object of the kind is held, and its quota is full; release objects or raise the quota";
    case SHMS_EBUSY:
        return "the object is promised, but a stopped writer has not decided to keep it yet; try again";
    default:
        return "not an error code of shmstore";
    }
}
