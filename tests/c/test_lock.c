/* The lock of a writer's threads: first come, first served, also behind more threads than there are bits to wake. */
#include <pthread.h>

#include "support.h"

#define THREADS 40

static shms_lock lock;
static int order[THREADS + 1], n;

static void *take(void *arg) {
    shms_lock_take(&lock);
    order[n++] = (int)(intptr_t)arg;
    shms_lock_leave(&lock);
    return NULL;
}

static void who_lets_others_go_comes_behind_all_that_wait(void) {
    pthread_t threads[THREADS];
    shms_lock_take(&lock);
    CHECK_EQ(1, shms_lock_asked(&lock));
    for (int i = 0; i < THREADS; i++) {
        CHECK_EQ(0, pthread_create(&threads[i], NULL, take, (void *)(intptr_t)i));
        while (shms_lock_asked(&lock) < (uint32_t)i + 2)
            usleep(100);
    }
    shms_lock_leave(&lock);
    take((void *)(intptr_t)THREADS);
    for (int i = 0; i < THREADS; i++)
        CHECK_EQ(0, pthread_join(threads[i], NULL));
    CHECK_EQ(THREADS + 1, n);
    for (int i = 0; i <= THREADS; i++)
        CHECK_EQ(i, order[i]);
    CHECK_EQ(0, shms_lock_asked(&lock));
}

static uint64_t sum;

static void *add(void *arg) {
    for (int i = 0; i < 20000; i++) {
        shms_lock_take(&lock);
        sum++;
        shms_lock_leave(&lock);
    }
    return arg;
}

static void one_thread_at_a_time_has_it(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQ(0, pthread_create(&threads[i], NULL, add, NULL));
    for (int i = 0; i < 4; i++)
        CHECK_EQ(0, pthread_join(threads[i], NULL));
    CHECK_EQ(80000, sum);
}

int main(void) {
    lock.next = lock.serving = UINT32_MAX - 20; /* numbers begin again */
    who_lets_others_go_comes_behind_all_that_wait();
    one_thread_at_a_time_has_it();
    return 0;
}
