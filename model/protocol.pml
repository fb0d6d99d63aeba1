/*
 * protocol.pml - the protocol of docs/concepts/protocol.md: a writer, which may be killed, and its successor; NR ranks, which
 * may be killed, close and attach again; NS slots; NL lease entries.
 * - One scheduled step has at most one access to a word that another process writes.
 * - A comment at its end has the labels of csrc/: "R2a:" corresponds to SHMS_STEP("R2a").
 * - Memory is sequentially consistent, except if a switch MUT_* puts a store into a buffer.
 * - Variables named g_ are ghosts. They state the promises, and the protocol never reads them.
 *
 * check.py sets sizes and switches, and says which switches must fail. README.md lists what the model leaves out.
 */
#ifndef NR
#define NR 1                            /* ranks, 1 or 2 */
#endif
#ifndef THREADS
#define THREADS 1                       /* 2: rank 0 is one process with two threads, never killed */
#endif
#ifndef NS
#define NS 1                            /* slots, 1 or 2 */
#endif
#ifndef NL
#define NL 1                            /* lease entries, 1 or 2 */
#endif
#ifndef MAXH
#define MAXH 2                          /* hand-outs */
#endif
#ifndef MAXID
#define MAXID 2                         /* objects put in all */
#endif
#ifndef WOPS
#define WOPS 6                          /* operations of both writers together */
#endif
#ifndef ROPS
#define ROPS 2                          /* operations of one reader, besides the last round */
#endif
#ifndef WCRASH
#define WCRASH 1
#endif
#ifndef RCRASH
#define RCRASH 1                        /* kills of all readers together */
#endif
#ifndef CLOSES
#define CLOSES 0                        /* closes of all readers together */
#endif
#ifndef ONEKEY
#define ONEKEY 0                        /* all objects have the same key; they are deleted and put again */
#endif
#ifndef BREATHS
#define BREATHS 0                       /* between W1 and W2 the search yields the mutex to other threads of the writer */
#endif
#ifndef RETIRE
#define RETIRE 0                        /* the writer may retire rank 0 once, at any moment */
#endif
#ifndef HOLD
#define HOLD 0                          /* the writer may hold hand-out 1, at any moment */
#endif

#define FREE 0
#define WRITING 1
#define LIVE 2
#define EVICTING 3

#define UNKNOWN 0
#define HERE 1
#define GONE 2
#define CLOSED 255                      /* a base above every lease */

byte st[NS]; byte id[NS]; byte data[NS]; bool del[NS];              /* written by the writer */
byte lseq[NL]; byte lslot[NL]; byte lid[NL];
byte nextseq = 1; byte published = 1; byte nextid = 1; byte retired[NR];
byte pins[NR*NS]; byte ack[NR*NL]; byte base[NR]; byte epoch[NR];   /* written by rank r */
#if HOLD
bool held[NL];                                                      /* written by the writer, in the word of lslot */
#endif
bool lock[NR]; bool wlock;                                          /* held by the kernel */
#ifdef MUT_R1_RELAXED
byte sbR[NR];
#endif
#ifdef MUT_W2_UNFENCED
byte sbW;
#endif

#define NP (NR*THREADS)                 /* reader processes, or threads */
#define RANK(p) ((p) % NR)
#define P(r,s) pins[(r)*NS+(s)]
#define A(r,l) ack[(r)*NL+(l)]

/* Ghosts. Hand-out h has the lease number h. */
byte g_id[MAXH+1]; byte g_slot[MAXH+1]; byte g_entry[MAXH+1]; byte g_nref;
bool g_owed[NR*(MAXH+1)];               /* promised to the rank, and not yet taken, released or cancelled */
bool g_due[NR*(MAXH+1)];                /* or opened while the rank was attaching; no other lease may expect the rank */
bool g_up[NR]; bool g_may[NR];          /* a hand-out now is promised to the rank; may be promised */
bool g_ret[NR];                         /* retired, and not attached since then */
byte g_view[NP];                        /* slot + 1 of a live view */
bool g_com[MAXID+1];                    /* committed, and not evicted since then */
#if HOLD
bool g_held[MAXH+1];                    /* held, and not cancelled since then */
#define HELD(l) held[l]
#define RELEASE(h) g_held[h] = 0
#define FRESH(l) held[l] = 0
#else
#define HELD(l) false
#define RELEASE(h) skip
#define FRESH(l) skip
#endif
#ifdef MUT_HOLD_READ
#define MAY_END(l) true
#else
#define MAY_END(l) (!HELD(l))
#endif
/* A death is one step: no other process runs until the kernel has stopped all threads. */
#define THE_WRITER 2
#define NOBODY 3
byte nops; byte nkill; byte nwkill; byte nclose; byte dying = NOBODY; bool wdone; bool rdone[NP]; bool final;

#define O(r,h) g_owed[(r)*(MAXH+1)+(h)]
#define D(r,h) g_due[(r)*(MAXH+1)+(h)]
#define VIEWED(s) (g_view[0] == (s)+1 || g_view[NP-1] == (s)+1)
#define SETTLED(r,h) O(r,h) = 0; D(r,h) = 0
#define EXCUSED(r) g_up[r] = 0; g_may[r] = 0; k = 1; do :: k <= MAXH -> SETTLED(r,k); k++ :: else -> break od; k = 0

/* ---------------------------------------------------------------- readers: readers.c, reader.c */

#ifdef MUT_R1_RELAXED
#define FLUSHR(r) if :: sbR[r] != 0 -> P(r,sbR[r]-1)++; sbR[r] = 0 :: else fi
#else
#define FLUSHR(r) skip
#endif

inline do_ack(r, h)
{
#ifdef MUT_ACK_UNASKED
        atomic { A(r,g_entry[h]) = h };
#else
        if :: atomic { lseq[g_entry[h]] != h -> skip }                              /* R3a: */
           :: atomic { lseq[g_entry[h]] == h -> skip };
#ifdef MUT_ACK_NO_MAXIMUM
              atomic { A(r,g_entry[h]) = h }
#else
              atomic { if :: A(r,g_entry[h]) < h -> A(r,g_entry[h]) = h :: else fi }        /* R3b: */
#endif
        fi
#endif
}

#define TAKEN(p,r,h) g_view[p] = g_slot[h]+1; SETTLED(r,h)
#define STALE(r,h) assert(!O(r,h))      /* fails if the object was promised to this rank */

#ifdef MUT_CLOSE_EXPECTED
#define CLOSE(r) nclose++; EXCUSED(r)
#else
#define CLOSE(r) nclose++; EXCUSED(r); base[r] = CLOSED                             /* E1: */
#endif

inline do_get(p, r, h)
{
#ifdef MUT_R3_FIRST
        do_ack(r,h);
#endif
#ifdef MUT_R1_RELAXED
        sbR[r] = g_slot[h]+1;
#else
        P(r,g_slot[h])++;                                                           /* R1: */
#endif
#if defined(MUT_NO_R2)
        atomic { ok = 1; TAKEN(p,r,h) };
#elif defined(MUT_ID_FIRST)
        atomic { ok = (id[g_slot[h]] == g_id[h]) };
        atomic { x = st[g_slot[h]];
                 if :: ok && x == LIVE -> TAKEN(p,r,h) :: else -> x = 0; ok = 0; STALE(r,h) fi };
#else
        x = st[g_slot[h]];                                                          /* R2a: R2c: */
look:   atomic { ok = 0;                                                            /* R2b: and the id of R2c */
                 if :: id[g_slot[h]] == g_id[h] && (x == LIVE || (x == EVICTING && orphan)) -> ok = 1; TAKEN(p,r,h)
                    :: id[g_slot[h]] == g_id[h] && x == EVICTING && !orphan
                    :: else -> x = 0; STALE(r,h)
                 fi };
        if :: atomic { !ok && x == EVICTING ->                                      /* wait_for_eviction */
#ifdef MUT_EVICTING_IS_LIVE
                      ok = 1; TAKEN(p,r,h) }
#else
                      if :: st[g_slot[h]] != EVICTING -> x = st[g_slot[h]]; goto look   /* R2c: another turn */
                         :: true -> x = 0; STALE(r,h)                               /* PATIENCE_NS has passed */
                         :: !wlock ->                                               /* R2p: */
#ifdef MUT_ORPHAN_UNASKED
                            ok = 1; TAKEN(p,r,h)
#else
                            orphan = 1
#endif
                      fi };
              if :: atomic { orphan -> x = st[g_slot[h]]; goto look }               /* R2c: */
                 :: atomic { !orphan -> skip }
              fi
#endif
           :: atomic { ok || x != EVICTING -> skip }
        fi;
#endif
        if :: atomic { ok -> x = 0; orphan = 0; FLUSHR(r) };
#ifndef MUT_R3_FIRST
              do_ack(r,h);
#endif
              atomic { assert(data[g_slot[h]] == g_id[h]); ok = 0;
                       if :: nclose < CLOSES && !wdone -> CLOSE(r); closing = 1
#ifdef MUT_CLOSE_EARLY
                             ; lock[r] = 0      /* the lock goes with the handle, not with the last view */
#endif
                          :: true fi };
              if :: atomic { assert(data[g_slot[h]] == g_id[h]); g_view[p] = 0; P(r,g_slot[h])-- }  /* R4: */
                 :: atomic { closing -> rdone[p] = 1 }; atomic { final -> goto rest }       /* a view that is never released */
              fi
           :: atomic { !ok -> x = 0; orphan = 0; FLUSHR(r); P(r,g_slot[h])-- }      /* R4: */
        fi
}

/* A death ends the promises to the rank. It keeps those to a rank that has never attached (A3). */
#define LEAVE(r) if :: epoch[r] > 0 -> EXCUSED(r) :: else fi
#define MAYBE(r) if :: !g_ret[r] -> g_may[r] = 1 :: else fi
#define ATTACHED(r) if :: !g_ret[r] -> g_up[r] = 1; g_may[r] = 1 :: else fi

proctype Reader(byte p; byte r) provided (dying == NOBODY || dying + 2 == _pid)
{
        byte n, h, x, k; bool ok, orphan, closing;
        if :: p >= NR -> epoch[r] > 0 :: else fi;       /* the second thread of an attached rank */
again:
        {
                if :: atomic { p < NR -> skip };
                        atomic { !lock[r] -> lock[r] = 1 };                         /* A1: */
#ifndef MUT_NO_A2
                        P(r,0) = 0;                                                 /* A2: */
#if NS > 1
                        P(r,1) = 0;
#endif
#endif
#ifdef MUT_A4_EARLY
                        k = epoch[r];
#else
                        atomic { k = epoch[r]; epoch[r]++; g_ret[r] = 0 };          /* A3: */
#endif
#ifdef MUT_RETIRED_UNSEEN
#define ENDED (k > 0)
#else
#define ENDED (k > 0 || retired[r] == k+1)
#endif
#ifndef MUT_NO_A4
                        if :: atomic { ENDED -> skip };                             /* A4: the retirement, */
                                atomic { x = published; MAYBE(r) };                 /* A4: the load, */
                                base[r] = x                                         /* A4: the store */
                           :: atomic { !ENDED -> base[r] = 0 }
                        fi;
#endif
#ifdef MUT_A4_EARLY
                        atomic { epoch[r]++; g_ret[r] = 0 };
#endif
                        atomic { x = 0; k = 0; ATTACHED(r) }
                   :: atomic { p >= NR -> skip }
                fi;
                do
                :: atomic { n < ROPS && g_nref > 0 && !closing -> n++;
                            if :: g_nref >= 1 -> h = 1
                               :: g_nref >= 2 -> h = 2
#if MAXH >= 3
                               :: g_nref >= 3 -> h = 3
#endif
                            fi };
                   if :: do_get(p,r,h)
                      :: atomic { true -> SETTLED(r,h) }; do_ack(r,h)               /* release(ref) */
                   fi;
                   h = 0
                :: atomic { closing -> closing = 0; n = 0; lock[r] = 0; goto again }        /* the last view was released */
                :: atomic { nclose < CLOSES && !closing && !wdone -> CLOSE(r); closing = 1 }
                :: wdone && !closing -> break
                od;
                h = 1;                                  /* alive: takes or releases what it was promised, and no more */
                do :: atomic { h <= g_nref && D(r,h) -> SETTLED(r,h) }; do_ack(r,h); h++
                   :: atomic { h <= g_nref && !D(r,h) -> h++ }
                   :: atomic { h > g_nref -> break }
                od;
                atomic { h = 0; n = 0; rdone[p] = 1 };
                final
        } unless { dying == r };
        if :: atomic { dying == r ->                     /* the kernel stops the threads ... */
                FLUSHR(r); g_view[p] = 0; n = 0; h = 0; x = 0; k = 0; ok = 0; orphan = 0; closing = 0; rdone[p] = 0;
                LEAVE(r); lock[r] = 0; dying = NOBODY };                            /* ... then closes the files */
              if :: true -> goto again                  /* a new process attaches, */
                 :: atomic { true -> rdone[p] = 1 }     /* or no process does */
              fi
           :: final
        fi;
rest:   skip
}

#if RCRASH + WCRASH > 0
proctype Killer() provided (dying == NOBODY)
{
        do
#if RCRASH > 0
           :: atomic { nkill < RCRASH && !final && lock[0] -> dying = 0; nkill++ }
#if NR > 1
           :: atomic { nkill < RCRASH && !final && lock[1] -> dying = 1; nkill++ }
#endif
#endif
#if WCRASH > 0
           :: atomic { nwkill < WCRASH && !wdone && wlock -> dying = THE_WRITER; nwkill++ }
#endif
           :: final -> break
        od
}
#endif

#ifdef MUT_R1_RELAXED
proctype BufR() { do :: atomic { sbR[0] != 0 -> FLUSHR(0) } :: final -> break od }
#endif
#ifdef MUT_W2_UNFENCED
proctype BufW() { do :: atomic { sbW != 0 -> st[sbW-1] = EVICTING; sbW = 0 } :: final -> break od }
#endif

/* ---------------------------------------------------------------- the writer: reclaim.c, leases.c, objects.c */

#ifdef MUT_VERDICT_KEPT
#define ANEW skip
#else
#define ANEW atomic { verdict[0] = UNKNOWN; verdict[NR-1] = UNKNOWN }       /* shms_reclaim_begin */
#endif
#ifdef MUT_VERDICT_YIELDED
#define ANEW_UNLESS(yields) if :: yields -> skip :: else -> ANEW fi
#else
#define ANEW_UNLESS(yields) ANEW                                            /* also after yield_mutex */
#endif
#define JUDGE(r) if :: verdict[r] == HERE -> go = 0 :: else fi

inline ask_rank(r)         /* rank_gone without a remembered verdict; clears go if the rank is here */
{
        if :: atomic { verdict[r] != UNKNOWN -> JUDGE(r) }
           :: atomic { verdict[r] == UNKNOWN ->
#if defined(MUT_NEVER_IS_DEAD)
                if :: lock[r] -> verdict[r] = HERE :: else -> verdict[r] = GONE fi; JUDGE(r) }
#elif defined(MUT_PROBE_THEN_EPOCH)
                ok = lock[r] };
              atomic { if :: !ok && epoch[r] > 0 -> verdict[r] = GONE :: else -> verdict[r] = HERE fi; ok = 0; JUDGE(r) }
#else
                ok = (epoch[r] > 0) };                                              /* W1b: */
              atomic { if :: ok && !lock[r] -> verdict[r] = GONE :: else -> verdict[r] = HERE fi; ok = 0; JUDGE(r) }    /* W1c: */
#endif
        fi
}

#ifdef MUT_RETIRED_FOR_EVER
#define RETIRED(r) (retired[r] != 0)
#else
#define RETIRED(r) (retired[r] != 0 && retired[r] == epoch[r]+1)
#endif

inline lease_done_by(r)    /* clears go if the lease in entry l still expects rank r */
{
        if :: atomic { A(r,l) == lseq[l] -> skip }                                  /* W1a: the acknowledgement, */
           :: atomic { A(r,l) != lseq[l] -> skip };
              if :: atomic { base[r] > lseq[l] -> skip }                            /* the base, */
                 :: atomic { base[r] <= lseq[l] -> skip };
                    if :: atomic { RETIRED(r) -> skip }                             /* the retirement */
                       :: atomic { !RETIRED(r) -> skip };
                          ask_rank(r)
                    fi
              fi
        fi
}

inline lease_done()        /* entry l; go = closed */
{
        if :: atomic { MAY_END(l) -> skip }; lease_done_by(0)
           :: atomic { !MAY_END(l) -> go = 0 }
        fi;
#if NR > 1
        if :: go -> lease_done_by(1) :: else fi;
#endif
        atomic { if :: go -> lseq[l] = 0 :: else fi }                               /* C1: */
}

inline first_look(r, v)
{
        if :: atomic { go && P(r,v) != 0 -> skip }; ask_rank(r)
           :: atomic { !go || P(r,v) == 0 -> skip }
        fi
}

#define LEASED(e,v) (lseq[e] != 0 && lslot[e] == v)

inline evictable(v)           /* W1 and a first read of the pins of slot v; go = it may go */
{
        if :: atomic { st[v] == LIVE && LEASED(0,v) -> l = 0; go = 1 }; lease_done()
           :: atomic { !(st[v] == LIVE && LEASED(0,v)) -> go = (st[v] == LIVE) }
        fi;
#if NL > 1
        if :: atomic { go && LEASED(1,v) -> l = 1 }; lease_done(); l = 0
           :: atomic { !(go && LEASED(1,v)) -> skip }
        fi;
#endif
        first_look(0, v);
#if NR > 1
        first_look(1, v)
#endif
}

#ifdef MUT_W2_UNFENCED
#define SET_EVICTING(v) sbW = (v)+1
#define FLUSHW if :: sbW != 0 -> st[sbW-1] = EVICTING; sbW = 0 :: else fi
#else
#define SET_EVICTING(v) st[v] = EVICTING
#define FLUSHW skip
#endif

inline w3(r, v)
{
#if defined(MUT_NO_W3)
        skip
#elif defined(MUT_VERDICT_FOR_W3P)
        if :: atomic { P(r,v) == 0 -> skip }
           :: atomic { P(r,v) != 0 -> skip }; ask_rank(r)
        fi
#else
        if :: atomic { P(r,v) == 0 -> skip }                                        /* W3: */
           :: atomic { P(r,v) != 0 -> skip };
              atomic { if :: lock[r] -> go = 0 :: else fi }                         /* W3p: */
        fi
#endif
}

inline pinned(v)
{
        if :: atomic { go -> skip }; w3(0, v) :: atomic { !go -> skip } fi;
#if NR > 1
        if :: atomic { go -> skip }; w3(1, v) :: atomic { !go -> skip } fi
#endif
}

inline set_free(v)         /* asserts the two promises that W4 could break */
{
        atomic { k = 0; do :: k < NP -> assert(g_view[k] != v+1); k++ :: else -> break od;
                 k = 1; do :: k <= g_nref -> assert(!(g_slot[k] == v && g_id[k] == id[v] && (O(0,k) || O(NR-1,k)))); k++
                           :: else -> break od;
#if HOLD
                 assert(!(g_held[1] && g_slot[1] == v && g_id[1] == id[v]));
#endif
                 k = 0; st[v] = FREE; g_com[id[v]] = 0 }                            /* W4: */
}

#define PROMISE(r,h) O(r,h) = g_up[r]; D(r,h) = g_may[r]
#if NR > 1
#define PROMISES(h) PROMISE(0,h); PROMISE(1,h)
#else
#define PROMISES(h) PROMISE(0,h)
#endif
#define PROMISED(h) g_id[h] = id[s]; g_slot[h] = s; g_entry[h] = l; g_nref = h; PROMISES(h)
#define RAISE published = x+1

inline hand_out(yields)    /* hands out slot s with the free entry l; the reference goes out with L3 */
{
#if defined(MUT_L2_FIRST)
        atomic { lslot[l] = s; lid[l] = id[s]; x = nextseq; lseq[l] = x; RAISE; PROMISED(x); x = 0 };
        atomic { nextseq++; l = 0; ANEW_UNLESS(yields) }
#else
        atomic { lslot[l] = s; lid[l] = id[s]; x = nextseq; nextseq++;              /* L1: */
#ifndef MUT_HOLD_LEFT
                 FRESH(l)
#endif
#ifdef MUT_L3_EARLY
                 ; RAISE
#endif
               };
        lseq[l] = x;                                                                /* L2: */
        atomic { PROMISED(x);
#if !defined(MUT_L3_EARLY) && !defined(MUT_NO_L3)
                 RAISE;                                                             /* L3: */
#endif
                 x = 0; l = 0; ANEW_UNLESS(yields) }
#endif
}

#if NL > 1
#define PICK_FREE_ENTRY if :: lseq[0] == 0 -> l = 0 :: lseq[0] != 0 && lseq[1] == 0 -> l = 1 \
                           :: lseq[0] != 0 && lseq[1] != 0 -> l = NL fi
#else
#define PICK_FREE_ENTRY if :: lseq[0] == 0 -> l = 0 :: else -> l = NL fi
#endif

#if NL > 1
#define LEASED_NOW(v) (LEASED(0,v) || LEASED(1,v))
#else
#define LEASED_NOW(v) LEASED(0,v)
#endif

/* Between W1 and W2, another thread of the writer may get the mutex. It may hand out slot s, the first victim. */
inline yield_mutex()
{
#if BREATHS
        if :: atomic { go && !final && nextseq <= MAXH -> PICK_FREE_ENTRY };
              if :: atomic { l < NL -> skip }; hand_out(1)
                 :: atomic { l == NL -> l = 0 }
              fi
           :: true
        fi
#else
        skip
#endif
}

inline second_look(v)      /* was a lease opened on it in the meantime? */
{
#ifdef MUT_NO_SECOND_LOOK
        skip
#else
        atomic { if :: LEASED_NOW(v) -> go = 0 :: else fi }
#endif
}

inline evict(a, b)         /* slots a and b, which may be the same; go = they are free now */
{
        evictable(a);
#if NS > 1
        if :: atomic { go && a != b -> skip }; evictable(b) :: atomic { !(go && a != b) -> skip } fi;
#endif
        yield_mutex();
        second_look(a);
        if :: atomic { go -> skip };
#ifdef MUT_ONE_BY_ONE
                SET_EVICTING(a); pinned(a); if :: go -> set_free(a) :: else -> st[a] = LIVE fi;
                atomic { x = go };
                if :: atomic { go && a != b -> skip };
                        SET_EVICTING(b); pinned(b); if :: go -> set_free(b) :: else -> st[b] = LIVE fi
                   :: atomic { else -> skip }
                fi;
                atomic { assert(go || !x); x = 0 }                                  /* all or nothing */
#else
                SET_EVICTING(a);                                                    /* W2: */
#if NS > 1
                if :: atomic { a != b -> skip }; SET_EVICTING(b) :: atomic { a == b -> skip } fi;
#endif
                pinned(a);
#if NS > 1
                if :: atomic { a != b -> skip }; pinned(b) :: atomic { a == b -> skip } fi;
#endif
                atomic { FLUSHW };
                if :: atomic { go -> skip };
#ifdef MUT_FREE_LATE
                        data[a] = 0;                    /* bytes reused before FREE is written */
#endif
                        set_free(a);
#if NS > 1
                        if :: atomic { a != b -> skip }; set_free(b) :: atomic { a == b -> skip } fi
#endif
                   :: atomic { !go -> skip };
                        st[a] = LIVE;                                               /* W5: */
#if NS > 1
                        if :: atomic { a != b -> skip }; st[b] = LIVE :: atomic { a == b -> skip } fi;
#endif
                        ANEW                            /* the search starts again */
                fi
#endif
           :: atomic { !go -> skip }
        fi
}

inline recover()
{
        atomic { wlock = 1; s = 0 };
        do :: atomic { s < NS && st[s] == WRITING ->                                /* V1: */
#ifdef MUT_WRITING_IS_LIVE
                st[s] = LIVE; s++ }
#else
                st[s] = FREE; s++ }
#endif
#ifdef MUT_EVICTING_LEFT
           :: atomic { s < NS && st[s] == EVICTING -> s++ }
#else
           :: atomic { s < NS && st[s] == EVICTING -> st[s] = LIVE; s++ }           /* V2: */
#endif
           :: atomic { s < NS && (st[s] == FREE || st[s] == LIVE) -> s++ }
           :: atomic { s == NS -> s = 0; break }
        od;
#define NAMES_NOTHING (lseq[l] != 0 && (st[lslot[l]] != LIVE || lid[l] != id[lslot[l]]))
#ifdef MUT_NO_V3
#define UNKNOWN_TO_ALL false
#else
#define UNKNOWN_TO_ALL (lseq[l] >= published)           /* nobody has its reference */
#endif
        do :: atomic { l < NL && UNKNOWN_TO_ALL -> lseq[l] = 0; l++ }               /* V3: */
           :: atomic { l < NL && !UNKNOWN_TO_ALL -> assert(!NAMES_NOTHING); l++ }   /* for these V3 is never needed */
           :: atomic { l == NL -> l = 0; break }
        od;
        published = nextseq;                                                        /* V4: */
        /* every committed object is there, bit for bit; every object there was committed; no key is there twice */
        atomic { k = 1;
                 do :: k <= MAXID -> ok = 0; s = 0;
                       do :: s < NS -> if :: st[s] == LIVE && id[s] == k -> ok = 1; assert(data[s] == k) :: else fi; s++
                          :: else -> break od;
                       assert(ok == g_com[k]); k++
                    :: else -> break od;
#if ONEKEY && NS > 1
                 assert(!(st[0] == LIVE && !del[0] && st[1] == LIVE && !del[1]));
#endif
                 k = 0; s = 0; ok = 0 }
}

#if ONEKEY
bool indexed[NS];                                       /* the writer's private index */
#if NS > 1
#define KEY_IS_NEW (!indexed[0] && !indexed[1])
#else
#define KEY_IS_NEW (!indexed[0])
#endif
#define INDEX(s) indexed[s] = 1
#define FORGET(s) indexed[s] = 0
#else
#define KEY_IS_NEW true
#define INDEX(s) skip
#define FORGET(s) skip
#endif

proctype Writer(bool again) provided (dying == NOBODY || dying == THE_WRITER)
{
        byte l, s, x, k; bool ok, go; byte verdict[NR];
        {
                if :: atomic { again -> skip }; recover();   /* V0: */
#if ONEKEY
                      atomic { indexed[0] = st[0] == LIVE && !del[0]; indexed[NS-1] = st[NS-1] == LIVE && !del[NS-1] }
#endif
                   :: atomic { !again -> wlock = 1 }
                fi;
                do
                :: atomic { nops < WOPS -> nops++; if :: s = 0
#if NS > 1
                                                      :: s = 1
#endif
                                                   fi };
                        if :: atomic { st[s] == FREE && nextid <= MAXID && KEY_IS_NEW -> nextid++ };    /* P1: */
                                st[s] = WRITING;                                    /* P2: the state */
                                atomic { id[s] = nextid-1; del[s] = 0; INDEX(s) };  /* P2: the rest */
                                data[s] = 0                                         /* P3: */
                           :: atomic { st[s] == WRITING -> skip };
#ifdef MUT_LIVE_EARLY
                                atomic { st[s] = LIVE; g_com[id[s]] = 1 }; data[s] = id[s];
#else
                                data[s] = id[s];                                    /* P3c: to the end */
                                atomic { st[s] = LIVE; g_com[id[s]] = 1 };          /* P4: */
#endif
                                if :: atomic { true -> PICK_FREE_ENTRY };
                                      if :: atomic { l < NL && nextseq <= MAXH -> skip }; hand_out(0)
                                         :: atomic { !(l < NL && nextseq <= MAXH) -> l = 0 }
                                      fi
                                   :: true                                          /* a commit without a lease */
                                fi
                           :: atomic { st[s] == WRITING -> st[s] = FREE; FORGET(s) }        /* P5: abort */
                           :: atomic { st[s] == LIVE && !del[s] && nextseq <= MAXH -> PICK_FREE_ENTRY };
                                if :: atomic { l < NL -> skip }; hand_out(0)        /* a hit */
                                   :: atomic { l == NL -> go = 1;
                                               if :: lslot[0] != s || NL == 1 -> l = 0 :: NL > 1 -> l = NL-1 fi };
                                      lease_done();                                 /* reclaim_lease, of one entry */
                                      atomic { l = 0; go = 0 }
                                fi
                           :: atomic { st[s] == LIVE -> skip }; evict(s, s); atomic { if :: go -> FORGET(s) :: else fi }
#if NS > 1
                           :: atomic { s == 0 && st[0] == LIVE && st[1] == LIVE -> skip }; evict(0, 1);
                                atomic { if :: go -> FORGET(0); FORGET(1) :: else fi }
#endif
#if ONEKEY
                           :: atomic { st[s] == LIVE && !del[s] -> FORGET(s) };
#ifndef MUT_NO_D1
                                del[s] = 1;                                         /* D1: */
#endif
                                evict(s, s)                                         /* at once, if nothing holds it */
#endif
                           :: atomic { s == 0 && g_nref >= 1 -> RELEASE(1); SETTLED(0,1); SETTLED(NR-1,1);
                                       if :: lseq[g_entry[1]] == 1 -> lseq[g_entry[1]] = 0 :: else fi }     /* C1: cancel */
                           :: atomic { s == 0 && g_nref >= 2 -> SETTLED(0,2); SETTLED(NR-1,2);
                                       if :: lseq[g_entry[2]] == 2 -> lseq[g_entry[2]] = 0 :: else fi }
#if HOLD
                           :: atomic { s == 0 && g_nref >= 1 && lseq[g_entry[1]] == 1 ->
                                       held[g_entry[1]] = 1; g_held[1] = 1 }       /* H1: */
#endif
#if RETIRE
                           :: atomic { s == 0 && retired[0] == 0 -> x = epoch[0] };
                              do :: retired[0] = x+1;                               /* T1: */
#ifdef MUT_NO_T2
                                    atomic { g_ret[0] = 1; EXCUSED(0); x = 0; break }
#else
                                    if :: atomic { epoch[0] == x -> g_ret[0] = 1; EXCUSED(0); x = 0; break }        /* T2: */
                                       :: atomic { epoch[0] != x -> x = epoch[0] }
                                    fi
#endif
                              od
#endif
                           :: atomic { true -> nops = WOPS }
                        fi;
                        atomic { s = 0; go = 0;
                                 /* a new operation forgets the verdicts; or this is a part of the same operation */
                                 if :: verdict[0] != UNKNOWN || verdict[NR-1] != UNKNOWN -> ANEW
                                    :: true fi }
                :: atomic { nops == WOPS -> break }
                od;
                atomic { s = 0; go = 0; verdict[0] = UNKNOWN; verdict[NR-1] = UNKNOWN; wdone = 1 }
        } unless { dying == THE_WRITER };
        if :: atomic { dying == THE_WRITER ->
                FLUSHW; l = 0; s = 0; x = 0; k = 0; ok = 0; go = 0;
                verdict[0] = UNKNOWN; verdict[NR-1] = UNKNOWN; dying = NOBODY; wlock = 0; run Writer(1) }
           :: atomic { wdone && rdone[0] && rdone[NP-1] -> final = 1;
                       /* The end: each rank is dead, or has taken or released all that it was promised. The operator
                        * retires the ranks that never attached, and the writer cancels what it holds. */
#if HOLD
                       if :: g_held[1] -> RELEASE(1); lseq[g_entry[1]] = 0 :: else fi;
#endif
                       if :: epoch[0] == 0 -> retired[0] = 1; EXCUSED(0) :: else fi;
                       if :: epoch[NR-1] == 0 -> retired[NR-1] = 1; EXCUSED(NR-1) :: else fi; s = 0 };
              do :: atomic { s < NS && st[s] == WRITING -> st[s] = FREE; s++ }
                 :: atomic { s < NS && st[s] != FREE && st[s] != WRITING -> skip };
                        evict(s, s); atomic { if :: VIEWED(s) -> go = 0 :: else -> assert(go) fi; s++ }     /* reclaimable */
                 :: atomic { s < NS && st[s] == FREE -> s++ }
                 :: atomic { s == NS -> s = 0; assert(lseq[0] == 0 && lseq[NL-1] == 0); break }
              od
        fi
}

init
{
        atomic {
                g_up[0] = 1; g_up[NR-1] = 1; g_may[0] = 1; g_may[NR-1] = 1;
                run Writer(0); run Reader(0, 0);
#if NP > 1
                run Reader(1, RANK(1));
#endif
#if RCRASH + WCRASH > 0
                run Killer();
#endif
#ifdef MUT_R1_RELAXED
                run BufR();
#endif
#ifdef MUT_W2_UNFENCED
                run BufW();
#endif
        }
}
