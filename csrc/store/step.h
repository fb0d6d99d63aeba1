/*
 * step.h - names the points between two accesses to shared memory, for tests that kill or interleave there.
 *
 * The labels are those of docs/concepts/protocol.md and of the Promela model. In a normal build, a step does nothing.
 * The C tests define SHMS_STEPS and set shms_step_hook, which is called *before* the access that the label names.
 * SHMS_LOOK marks points outside the protocol: where an inspector or a long call reads, and where a process waits for a
 * lock.
 */
#ifndef SHMS_STEP_H
#define SHMS_STEP_H

#ifdef SHMS_STEPS
extern void (*shms_step_hook)(const char *label);
#define SHMS_STEP(label)                                                                                               \
    do {                                                                                                               \
        if (shms_step_hook)                                                                                            \
            shms_step_hook(label);                                                                                     \
    } while (0)
#else
#define SHMS_STEP(label)                                                                                               \
    do {                                                                                                               \
    } while (0)
#endif

#define SHMS_LOOK(label) SHMS_STEP(label)

#endif
