/*
 * finding.pml - a look-up by key, as in docs/concepts/protocol.md, "Found by a rank". A writer owns a slot. Rank 0 finds the object
 * in it by key, pins it for itself, and passes on a reference without a lease. Rank 1 gets that reference. Each of the
 * three may be killed at any moment and be succeeded, and the writer may be stopped for good.
 *
 * - Steps, labels and ghosts are as in protocol.pml. There are no leases, since none protects what is found.
 * - Each object has its own key. The published index leads to the slot in any case; what it leads to is a candidate.
 *
 * check.py sets sizes and switches, and says which switches must fail. README.md lists what the model leaves out.
 */
#ifndef MAXID
#define MAXID 3                         /* objects put in all */
#endif
#ifndef WDEATHS
#define WDEATHS 1
#endif
#ifndef RDEATHS
#define RDEATHS 1                       /* kills of both ranks together */
#endif
#ifndef FINDS
#define FINDS 2                         /* look-ups, and as many reads of what was passed on */
#endif

#define FREE 0
#define WRITING 1
#define LIVE 2
#define EVICTING 3

byte st; byte id; byte data; byte nextid = 1;                           /* written by the writer */
byte pins[2];                                                           /* written by rank r */
bool lock[2]; bool wlock;                                               /* held by the kernel */
byte passed;                                                            /* the id in the last reference; 0: none yet */

byte g_view[2];                         /* id of a live view, or of what was found; 0: none */
bool g_whole;                           /* rank 0 has held the object since before rank 1 pinned it */
byte deaths; byte wdeaths; bool done[2]; bool wdone;

#define SETTLE(r) g_view[r] = 0; g_whole = (r == 0 -> 0 : g_whole)
/* A death, which takes the lock with it, and a successor; at any step of a rank. */
#define MAY_DIE(r) atomic { deaths < RDEATHS -> deaths++; SETTLE(r); lock[r] = 0; goto born }

proctype Finder()
{
        byte h, x;
born:   atomic { h = 0; x = 0; lock[0] = 1 };                                       /* A1: */
        pins[0] = 0;                                                                /* A2: */
        do
        :: atomic { !done[0] && st == LIVE && id != 0 -> h = id };                  /* the look: key and state, no pin */
                pins[0]++;                                                          /* R1: */
                x = st;                                                             /* R2a: */
#ifdef MUT_FIND_EVICTING
                if :: atomic { id == h && (x == LIVE || x == EVICTING) ->
#elif defined(MUT_FIND_UNASKED)
                if :: atomic { true ->
#else
                if :: atomic { id == h && x == LIVE ->                              /* R2b: */
#endif
                        g_view[0] = h; passed = h };
                        do :: atomic { true -> assert(data == h); skip }; break     /* the bytes are the object's */
                           :: MAY_DIE(0)
                        od;
                        atomic { SETTLE(0); pins[0]-- }                             /* R4: */
                   :: atomic { else -> pins[0]-- }                                  /* R4: a miss */
                fi;
                atomic { h = 0; x = 0; if :: true -> done[0] = 1 :: true fi }
        :: MAY_DIE(0)
        :: atomic { true -> done[0] = 1; break }
        od;
        lock[0] = 0
}

proctype Getter()
{
        byte h, x, n;
born:   atomic { h = 0; x = 0; lock[1] = 1 };                                       /* A1: */
        pins[1] = 0;                                                                /* A2: */
        do
        :: atomic { n < FINDS && passed -> n++; h = passed; g_whole = (g_view[0] == h) };
                pins[1]++;                                                          /* R1: */
                x = st;                                                             /* R2a: R2c: */
look:           if :: atomic { id == h && x == LIVE -> g_view[1] = h };             /* R2b: */
                        assert(data == h);
                        if :: true :: MAY_DIE(1) fi;
                        atomic { assert(data == h); SETTLE(1); pins[1]-- }          /* R4: */
                   :: atomic { id == h && x == EVICTING -> skip };
                        if :: atomic { st != EVICTING -> x = st; goto look }        /* R2c: */
                           :: atomic { true ->                                      /* PATIENCE_NS has passed */
#ifdef MUT_BUSY_IS_STALE
                                assert(!g_whole);
#endif
                                pins[1]-- }                                         /* R4: busy */
                           :: atomic { !wlock -> x = st };                          /* R2p: then R2c */
                                if :: atomic { id == h && x == EVICTING -> x = LIVE; goto look }
                                   :: atomic { else -> goto look }
                                fi
                        fi
                   :: atomic { !(id == h && (x == LIVE || x == EVICTING)) ->
                                assert(!g_whole);                                   /* stale: nobody holds it */
                                pins[1]-- }                                         /* R4: */
                fi;
                atomic { h = 0; x = 0 }
        :: MAY_DIE(1)
        :: atomic { true -> done[1] = 1; break }
        od;
        lock[1] = 0
}

proctype Writer()
{
        byte r; bool go;
born:   atomic { wlock = 1; r = 0; go = 0 };
        if :: st == WRITING -> st = FREE :: st == EVICTING -> st = LIVE :: else fi; /* V1: V2: */
        do
        :: atomic { st == FREE && nextid <= MAXID -> nextid++ };                    /* P1: */
                st = WRITING;                                                       /* P2: */
                id = nextid-1;
                data = 0;                                                           /* P3: */
                data = id;
                st = LIVE                                                           /* P4: */
        :: atomic { st == LIVE -> st = EVICTING; go = 1; r = 0 };                   /* W2: */
                if :: true :: atomic { wdeaths < WDEATHS -> wdeaths++; wlock = 0; goto born } fi;
                do
                :: r < 2 ->
#ifndef MUT_FINDER_UNSEEN
                        if :: atomic { pins[r] != 0 -> go = (go && !lock[r]) }      /* W3: W3p: */
                           :: atomic { pins[r] == 0 -> skip }
                        fi;
#else
                        if :: atomic { r == 1 && pins[r] != 0 -> go = (go && !lock[r]) }
                           :: atomic { r == 0 || pins[r] == 0 -> skip }
                        fi;
#endif
                        r++
                :: else -> break
                od;
                atomic { if :: go -> assert(!g_view[0] && !g_view[1]); st = FREE    /* W4: */
                            :: else -> st = LIVE fi; go = 0; r = 0 }                /* W5: */
        :: atomic { wdeaths < WDEATHS -> wdeaths++; wlock = 0; goto born }
        :: atomic { true -> break }                                                 /* stopped for good, lock held */
        od
}

init { atomic { run Writer(); run Finder(); run Getter() } }
