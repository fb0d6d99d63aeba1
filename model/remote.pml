/*
 * remote.pml - several writers, as in docs/concepts/protocol.md. Writer A owns a slot. Writer B hands out what is in it: it
 * opens leases of its own there. NR ranks read what A and B hand out; rank r is group r+1. Each of them may be killed at
 * any moment and be succeeded.
 *
 * - Steps, labels and ghosts are as in protocol.pml. B has a count of pins for each slot here, and an entry has its slot,
 *   group and next entry in words of their own. README.md says why the code needs less.
 * - A hands out nothing of B, because a writer's words for others' slots and its own slots have nothing to do with each other.
 * - The words of an entry are stored in one step, because its number is 0 then.
 * - Ranks and both writers have attached. What goes on inside a put, an attachment or a hand-out of A's is coarse here.
 *
 * check.py sets sizes and switches, and says which switches must fail. README.md lists what the model leaves out.
 */
#ifndef NR
#define NR 1                            /* ranks, 1 or 2 */
#endif
#ifndef NB
#define NB 1                            /* lease entries of B, 1 or 2 */
#endif
#ifndef MAXB
#define MAXB 2                          /* leases of B */
#endif
#ifndef MAXA
#define MAXA 0                          /* leases of A */
#endif
#ifndef MAXID
#define MAXID 2                         /* objects put in all; the first is there */
#endif
#ifndef AOPS
#define AOPS 2                          /* operations of A, besides puts and the last round */
#endif
#ifndef BOPS
#define BOPS 2                          /* operations of B */
#endif
#ifndef ROPS
#define ROPS 1                          /* operations of one reader, besides the last round */
#endif
#ifndef ADEATHS
#define ADEATHS 1
#endif
#ifndef BDEATHS
#define BDEATHS 1
#endif
#ifndef RDEATHS
#define RDEATHS 1                       /* kills of all readers together */
#endif
#ifndef GROUPS
#define GROUPS 0                        /* B's leases are for a group, named when they are opened or later */
#endif
#ifndef OWN
#define OWN 0                           /* B opens leases on an object of its own, too */
#endif

#ifndef KEEP
#define KEEP 0                          /* B's successor keeps the leases of a dead B whose object is still there */
#endif

#define FREE 0
#define WRITING 1
#define LIVE 2
#define EVICTING 3

#define WA 0                            /* the writers; also the index of their words */
#define WB 1
#define ALL 0                           /* a group */
#define THERE 0                         /* A's slot */
#define ELSEWHERE 1                     /* any other slot */
#define NE (NB+1)                       /* entry 0 is A's, entries 1 to NB are B's */

byte st = LIVE; byte id = 1; byte nextid = 2;                               /* written by A */
byte lseq[NE]; bit lslot[NE]; byte lgroup[NE]; byte lnext[NE];              /* by the entry's writer */
byte nextseq[2] = 1; byte published[2] = 1;                                 /* by the writer */
byte pinB; byte first;                                                      /* by B: its word for A's slot */
byte pins[NR]; byte ack[NR*NE]; byte base[NR*2]; bool lock[NR] = 1; bool wlock[2] = 1;
#ifdef MUT_B1_RELAXED
bool sbB;
#endif
#ifdef MUT_REUSE_UNFENCED
byte sbC;
#endif

#define ACK(r,e) ack[(r)*NE+(e)]
#define BASE(r,w) base[(r)*2+(w)]
#define GROUP_OF(r) ((r)+1)
#ifdef MUT_GROUP_UNASKED
#define MEANS(g,r) true
#elif defined(MUT_ALL_IS_NOBODY)
#define MEANS(g,r) (g == GROUP_OF(r))
#else
#define MEANS(g,r) (g == ALL || g == GROUP_OF(r))
#endif

/* Ghosts. Reference h is B's lease h, or A's lease h - MAXB. */
#define MAXH (MAXB+MAXA)
#define NUMBER(h) ((h) > MAXB -> (h)-MAXB : (h))
byte g_id[MAXH+1]; byte g_entry[MAXH+1]; bool g_sent[NR*(MAXH+1)];
bool g_void[MAXH+1];                    /* B died since; its successor may renew the promise */
bool g_owed[NR*(MAXH+1)]; bool g_due[NR*(MAXH+1)];                          /* as in protocol.pml */
bool g_up[NR] = 1; bool g_may[NR*2] = 1;
bool g_view[NR];                                                            /* a live view of the slot */
byte g_whole = 1;                                                           /* the object whose bytes are in the slot, or 0 */

#define O(r,h) g_owed[(r)*(MAXH+1)+(h)]
#define D(r,h) g_due[(r)*(MAXH+1)+(h)]
#define SENT(r,h) g_sent[(r)*(MAXH+1)+(h)]
#define MAY(r,w) g_may[(r)*2+(w)]
#define SETTLED(r,h) O(r,h) = 0; D(r,h) = 0

#define THE_A 2                         /* dying: rank 0, rank 1, ... */
#define THE_B 3
#define NOBODY 4
byte dying = NOBODY; byte na; byte nb; byte nr;                             /* deaths of A, of B, of ranks */
bool adone; bool bdone; bool slow; bool rdone[NR]; bool final;

#if NR > 1
#define SECOND(what) what
#else
#define SECOND(what) skip
#endif

/* ---------------------------------------------------------------- ranks */

inline do_ack(r, h)
{
        if :: atomic { lseq[g_entry[h]] != NUMBER(h) -> skip }                      /* R3a: */
           :: atomic { lseq[g_entry[h]] == NUMBER(h) -> skip };
              atomic { if :: ACK(r,g_entry[h]) < NUMBER(h) -> ACK(r,g_entry[h]) = NUMBER(h) :: else fi }        /* R3b: */
        fi
}

#define TAKEN(r,h) assert(g_whole == g_id[h]); g_view[r] = 1; SETTLED(r,h)
#define STALE(r,h) assert(taken || !O(r,h) || g_void[h])
#ifdef MUT_ORPHAN_OF_B
#define ORPHANED !wlock[WB]             /* asks the writer of the lease */
#else
#define ORPHANED !wlock[WA]             /* asks the owner of the slot */
#endif

inline do_get(r, h)
{
        pins[r]++;                                                                  /* R1: */
        x = st;                                                                     /* R2a: R2c: */
look:   atomic { if :: id == g_id[h] && (x == LIVE || (x == EVICTING && orphan)) -> taken = 1; TAKEN(r,h)       /* R2b: */
                    :: id == g_id[h] && x == EVICTING && !orphan
                    :: else -> x = FREE; STALE(r,h)
                 fi };
        if :: atomic { !taken && x == EVICTING -> skip };
              if :: atomic { st != EVICTING -> x = st; goto look }                  /* R2c: */
                 :: atomic { ORPHANED -> orphan = 1 }; atomic { x = st; goto look } /* R2p: R2c: */
                 :: atomic { true -> x = FREE };                                    /* PATIENCE_NS has passed */
#ifdef MUT_EVICTING_IS_STALE
                    atomic { STALE(r,h) }
#else
                    atomic { if :: lseq[g_entry[h]] != NUMBER(h) -> STALE(r,h)      /* R2n: */
                                :: else /* busy: the caller tries again */ fi }
#endif
              fi
           :: atomic { taken || x != EVICTING -> skip }
        fi;
        if :: atomic { taken -> taken = 0; x = 0; orphan = 0 }; do_ack(r,h)
           :: atomic { !taken -> x = 0; orphan = 0 }
        fi;
        atomic { g_view[r] = 0; pins[r]--; h = 0 }                                  /* R4: */
}

#ifdef MUT_ONE_BASE
#define PUBLISHED(w) published[WA]
#else
#define PUBLISHED(w) published[w]
#endif

#if MAXH > 2
#define ANY_SENT(r) (SENT(r,1) || SENT(r,2) || SENT(r,3))
#elif MAXH > 1
#define ANY_SENT(r) (SENT(r,1) || SENT(r,2))
#else
#define ANY_SENT(r) SENT(r,1)
#endif

proctype Reader(byte r) provided (dying == NOBODY || dying + 1 == _pid)
{
        byte n, h, x; bool taken, orphan;
        goto attached;
again:
        {
                lock[r] = 1;                                                        /* A1: */
                pins[r] = 0;                                                        /* A2: A3: the epoch is not modelled */
#if MAXA
                atomic { x = PUBLISHED(WA); MAY(r,WA) = 1 }; BASE(r,WA) = x;        /* A4: */
#endif
                atomic { x = PUBLISHED(WB); MAY(r,WB) = 1 };                        /* A4: */
                atomic { BASE(r,WB) = x; x = 0; g_up[r] = 1 };                      /* A4: */
attached:       do
                :: atomic { n < ROPS && ANY_SENT(r) -> n++;
                            if :: SENT(r,1) -> h = 1
#if MAXH > 1
                               :: SENT(r,2) -> h = 2
#endif
#if MAXH > 2
                               :: SENT(r,3) -> h = 3
#endif
                            fi };
                   if :: do_get(r,h)
                      :: atomic { true -> SETTLED(r,h) }; do_ack(r,h); h = 0        /* release(ref) */
                   fi
                :: adone && bdone -> break
                od;
                h = 1;                                  /* alive: takes or releases what it was promised, and no more */
                do :: atomic { h <= MAXH && D(r,h) -> SETTLED(r,h) }; do_ack(r,h); h++
                   :: atomic { h <= MAXH && !D(r,h) -> h++ }
                   :: atomic { h > MAXH -> break }
                od;
                atomic { h = 0; n = 0; rdone[r] = 1 };
end:            false
        } unless { dying == r };
        if :: atomic { dying == r ->
                g_view[r] = 0; n = 0; h = 1; x = 0; taken = 0; orphan = 0; rdone[r] = 0;
                do :: h <= MAXH -> SETTLED(r,h); h++ :: else -> break od; h = 0;
                g_up[r] = 0; MAY(r,WA) = 0; MAY(r,WB) = 0; lock[r] = 0; dying = NOBODY;
                if :: goto again :: rdone[r] = 1; goto end fi }
        fi
}

proctype Killer() provided (dying == NOBODY)
{
end:    do :: atomic { na < ADEATHS && !adone && wlock[WA] -> na++; dying = THE_A }
           :: atomic { nb < BDEATHS && !bdone && wlock[WB] -> nb++; dying = THE_B }
           :: atomic { nr < RDEATHS && !final && lock[0] -> nr++; dying = 0 }
#if NR > 1
           :: atomic { nr < RDEATHS && !final && lock[1] -> nr++; dying = 1 }
#endif
        od
}

/* ---------------------------------------------------------------- B hands out what is in A's slot */

#ifdef MUT_B1_RELAXED
#define PIN sbB = 1
#define FLUSH if :: sbB -> pinB++; sbB = 0 :: else fi
proctype BufB() { end: do :: atomic { sbB -> FLUSH } od }
#else
#define PIN pinB++
#define FLUSH skip
#endif
#ifdef MUT_REUSE_UNFENCED
#define ZERO if :: sbC != 0 -> lseq[sbC] = 0; sbC = 0 :: else fi
#define SHUT(e) (lseq[e] == 0 || sbC == e)
#define CLOSE(e) ZERO; sbC = e
#define REUSE(e) if :: sbC == e -> sbC = 0 :: else fi
proctype BufC() { end: do :: atomic { sbC != 0 -> ZERO } od }
#else
#define ZERO skip
#define SHUT(e) (lseq[e] == 0)
#define CLOSE(e) lseq[e] = 0
#define REUSE(e) skip
#endif

#if NB > 1
#define MAY_OPEN (n < BOPS && nextseq[WB] <= MAXB && (SHUT(1) || SHUT(2)))
#define MAY_CLOSE (n < BOPS && !(SHUT(1) && SHUT(2)))
#define FREE_ENTRY if :: SHUT(1) -> e = 1 :: else -> e = 2 fi
#define OPEN_ENTRY if :: !SHUT(1) -> e = 1 :: !SHUT(2) -> e = 2 fi
#else
#define MAY_OPEN (n < BOPS && nextseq[WB] <= MAXB && SHUT(1))
#define MAY_CLOSE (n < BOPS && !SHUT(1))
#define FREE_ENTRY e = 1
#define OPEN_ENTRY e = 1
#endif
#if GROUPS
#define CHOOSE if :: g = ALL :: g = 1 :: g = 2 fi
#else
#define CHOOSE g = ALL
#endif

#define FOR(g,r) (g == ALL || g == GROUP_OF(r))
#define PROMISE(r) if :: FOR(g,r) -> O(r,h) = g_up[r]; D(r,h) = MAY(r,WB) :: else fi
#define SEND(r) if :: FOR(g,r) -> SENT(r,h) = 1 :: else fi
#define NOT_FOR(r) if :: FOR(g,r) -> skip :: else -> SETTLED(r,h) fi
#define VOID(r) k = 1; do :: k <= MAXB -> SETTLED(r,k); k++ :: else -> break od; k = 0

inline publish()           /* B3 and B4: opens a lease on object x of A's slot with entry e, for group g */
{
        atomic { h = nextseq[WB]; nextseq[WB]++; ZERO };                            /* L1: */
#ifdef MUT_B5_EARLY
        pinB--;
#endif
        atomic { lslot[e] = THERE; lgroup[e] = g; lnext[e] = first; g_id[h] = x };  /* L2: the entry, */
        lseq[e] = h;                                                                /* L2: its number, */
        first = e;                                                                  /* B4: the chain */
        atomic { published[WB] = h+1;                                               /* L3: */
                 assert(g_whole == x);                                              /* granted */
                 g_entry[h] = e; PROMISE(0); SECOND(PROMISE(1)) }
}

inline send()              /* reference h, of a lease for group g; perhaps the group is named only now */
{
#if GROUPS
        if :: atomic { g == ALL -> g = 1; lgroup[e] = 1; NOT_FOR(0); NOT_FOR(1) }   /* G1: */
           :: atomic { g == ALL -> g = 2; lgroup[e] = 2; NOT_FOR(0); NOT_FOR(1) }
           :: true
        fi;
#endif
        atomic { SEND(0); SECOND(SEND(1)); h = 0; g = 0 }
}

inline hit_remote()
{
        PIN;                                                                        /* B1: */
#if defined(MUT_NO_B2)
        x = id;
        if :: true;
#elif defined(MUT_B2_ID_FIRST)
        x = id;
        if :: atomic { st == LIVE -> skip };
#else
        if :: atomic { st == LIVE -> skip }; x = id;                                /* B2a: and the id */
#endif
              atomic { FLUSH };
              publish();
#ifndef MUT_B5_EARLY
              pinB--;                                                               /* B5: */
#endif
              send()
           :: atomic { st != LIVE -> skip }; atomic { FLUSH }; pinB--               /* B2a: EVICTING is a miss, too */
        fi;
        atomic { x = 0; e = 0; h = 0; g = 0 }
}

inline unlink()            /* takes entry e out of the chain */
{
        atomic { if :: first == e -> first = lnext[e]
                    :: first != e && first != 0 && lnext[first] == e -> lnext[first] = lnext[e]
                    :: else fi }                                                    /* C2: */
}

#if KEEP
#ifdef MUT_KEEP_UNPINNED
#define KEEP_PIN skip
#define KEEP_UNPIN skip
#else
#define KEEP_PIN pinB++
#define KEEP_UNPIN pinB--
#endif

inline keep(k)             /* opens lease h of entry k again, if its object is still there; else ends it */
{
        atomic { h = lseq[k] };
        if :: atomic { h != 0 && h < published[WB] && lslot[k] == THERE -> skip };
              KEEP_PIN;                                                             /* B1: */
#ifndef MUT_KEEP_UNASKED
              do :: x = st;                                                         /* B2a: waits, as a reader */
                    atomic { if :: x == FREE || x == WRITING || id != g_id[h] -> x = FREE; break
                                :: x == LIVE && id == g_id[h] -> break
                                :: x == EVICTING && id == g_id[h] && g -> x = LIVE; break
                                :: x == EVICTING && id == g_id[h] && !g -> skip
                                :: x == EVICTING && id == g_id[h] && !g -> x = FREE; break  /* PATIENCE_NS has passed */
                             fi }
                    atomic { if :: x == EVICTING && !wlock[WA] -> g = 1 :: else fi }                /* R2p: */
              od;
#else
              x = LIVE;
#endif
              if :: atomic { x == LIVE -> lnext[k] = first };
                    atomic { first = k; assert(g_whole == g_id[h]); g_void[h] = 0 };        /* B4: granted again */
                    KEEP_UNPIN                                                      /* B5: */
                 :: atomic { x != LIVE -> skip }; KEEP_UNPIN; lseq[k] = 0           /* B5: V3: */
              fi
           :: atomic { !(h != 0 && h < published[WB] && lslot[k] == THERE) -> lseq[k] = 0 }  /* V3: */
        fi;
        atomic { if :: g_void[h] -> SETTLED(0,h); SECOND(SETTLED(1,h)); g_void[h] = 0 :: else fi; h = 0; g = 0; x = 0 }
}
#endif

#define SLOW if :: atomic { true -> slow = 1; bdone = 1; goto end } :: true fi      /* the start may last for ever */

proctype WriterB() provided (dying == NOBODY || dying == THE_B)
{
        byte n, e, h, g, x, k;
        goto attached;
again:
        {
                wlock[WB] = 1;                                                      /* V0: */
#ifdef MUT_J1_LATE
                SLOW;
#endif
#ifndef MUT_PINS_LEFT
                pinB = 0;                                                           /* J1: */
#endif
#ifndef MUT_FIRST_LEFT
                first = 0;                                                          /* J2: */
#endif
                SLOW;
#if KEEP
                keep(1);
#if NB > 1
                keep(2);
#endif
#elif !defined(MUT_NUMBERS_LEFT)
                lseq[1] = 0;                                                        /* V3: an entry on another's slot */
#if NB > 1
                lseq[2] = 0;
#endif
#endif
                published[WB] = nextseq[WB];                                        /* V4: */
attached:       do
                :: atomic { MAY_OPEN -> FREE_ENTRY; n++; CHOOSE }; hit_remote()
                :: atomic { MAY_CLOSE -> OPEN_ENTRY; n++; h = lseq[e] };
                   atomic { CLOSE(e); SETTLED(0,h); SECOND(SETTLED(1,h)); h = 0 };          /* C1: cancel, or complete */
                   unlink(); atomic { e = 0 }
#if OWN
                :: atomic { MAY_OPEN -> FREE_ENTRY; n++; h = nextseq[WB]; nextseq[WB]++ };
                   atomic { lslot[e] = ELSEWHERE; lgroup[e] = ALL; lnext[e] = 0 };
                   atomic { lseq[e] = h; REUSE(e); e = 0; h = 0 }                           /* L2: */
#endif
                :: atomic { true -> n = 0; bdone = 1; break }
                od;
end:            false
        } unless { dying == THE_B };
        if :: atomic { dying == THE_B ->
                FLUSH; ZERO; n = 0; e = 0; h = 0; g = 0; x = 0;
                wlock[WB] = 0; dying = NOBODY;
#if KEEP
                if :: k = 1; do :: k <= MAXB -> g_void[k] = 1; k++ :: else -> break od; k = 0; goto again
                   :: VOID(0); SECOND(VOID(1)); bdone = 1; goto end
                fi }
#else
                VOID(0); SECOND(VOID(1));
                if :: goto again :: bdone = 1; goto end fi }
#endif
        fi
}

/* ---------------------------------------------------------------- A reclaims */

/* Who was found dead in this operation. "Alive" need not be remembered, because it ends the eviction. */
#define FORGET gone[0] = 0; gone[NR-1] = 0; bgone = 0
#ifdef MUT_RANK_VERDICT_KEPT
#define FORGET_RANKS skip
#define FOUND_GONE(r) false             /* W3p asks again; only W3f believes the old verdict */
#else
#define FORGET_RANKS gone[0] = 0; gone[NR-1] = 0
#define FOUND_GONE(r) gone[r]
#endif

inline acknowledged_by(r, w)       /* W1a, W1c; sets open if lease n (entry e, group g, writer w) expects rank r */
{
        if :: atomic { open || !MEANS(g,r) || ACK(r,e) == n -> skip }               /* W1a: */
           :: atomic { !open && MEANS(g,r) && ACK(r,e) != n -> skip };
              if :: atomic { gone[r] || BASE(r,w) > n -> skip }                     /* W1a: */
                 :: atomic { !gone[r] && BASE(r,w) <= n -> skip };
                    atomic { if :: lock[r] -> open = 1 :: else -> gone[r] = 1 fi }  /* W1c: */
              fi
        fi
}

inline w3(r)               /* the pins of rank r */
{
        if :: atomic { !go || pins[r] == 0 || FOUND_GONE(r) -> skip }               /* W3: */
           :: atomic { go && pins[r] != 0 && !FOUND_GONE(r) -> skip };
              atomic { if :: lock[r] -> go = 0 :: else -> gone[r] = 1 fi }          /* W3p: */
        fi
}

inline w3_ranks()
{
        w3(0);
#if NR > 1
        w3(1)
#endif
}

#if defined(MUT_PIN_VERDICT_KEPT) || defined(MUT_LEASE_VERDICT_KEPT)
#define GLANCE atomic { kept = !wlock[WB] };
#else
#define GLANCE
#endif
#ifdef MUT_PIN_VERDICT_KEPT
#define PINNED_BY_THE_DEAD kept
#else
#define PINNED_BY_THE_DEAD !wlock[WB]
#endif
#ifdef MUT_LEASE_VERDICT_KEPT
#define LEASED_BY_THE_DEAD kept
#else
#define LEASED_BY_THE_DEAD (bgone || !wlock[WB])
#endif

inline w3h()               /* the pins of B */
{
#ifdef MUT_NO_W3H
        skip
#else
        if :: atomic { pinB == 0 -> skip }                                          /* W3h: */
           :: atomic { pinB != 0 -> skip };
              atomic { if :: PINNED_BY_THE_DEAD -> bgone = 1 :: else -> go = 0 fi } /* W3p: of a writer */
        fi
#endif
}

inline w3f()               /* B's leases on the slot; clears go if one is open */
{
        e = first;                                                                  /* W3f: the chain, */
        do
        :: atomic { e == 0 -> break }
        :: atomic { e != 0 -> n = lseq[e] };                                        /* W3n: the number of an entry, */
           atomic { moved = (n == 0 || lslot[e] != THERE); g = lgroup[e] };         /* W3n: slot and group, */
           atomic { x = lnext[e] };                                                 /* W3n: the next entry, */
#ifdef MUT_NUMBER_ONCE
           atomic { open = moved; moved = 0 };
#else
           atomic { open = (moved || lseq[e] != n); moved = 0 };                    /* W3n: and the number again */
#endif
#if defined(MUT_MOVED_IS_EMPTY)
           atomic { if :: open -> open = 0; e = 0; n = 0; g = 0; x = 0; break :: else fi };
#elif defined(MUT_MOVED_UNASKED)
           atomic { if :: open -> go = 0; open = 0; e = 0; n = 0; g = 0; x = 0; break :: else fi };
#endif
           acknowledged_by(0,WB);
#if NR > 1
           acknowledged_by(1,WB);
#endif
           if :: atomic { !open -> e = x; n = 0; g = 0; x = 0 }
              :: atomic { open -> open = 0; e = 0; n = 0; g = 0; x = 0;             /* open, or the chain has moved: */
#ifdef MUT_DEAD_HOLDS
                          go = 0
#else
                          if :: LEASED_BY_THE_DEAD -> bgone = 1 :: else -> go = 0 fi        /* W3w: */
#endif
                        }
           fi
        od
}

inline set_free()
{
        atomic { assert(!g_view[0]);
                 assert(!g_view[NR-1]);
                 k = 1;
                 do :: k <= MAXH -> assert(!(g_id[k] == id && !g_void[k] && (O(0,k) || O(NR-1,k)))); k++
                    :: else -> break
                 od;
                 k = 0; st = FREE; g_whole = 0 }                                    /* W4: */
}

inline evict()
{
        go = 1;
#if MAXA
        if :: atomic { lseq[0] != 0 -> e = 0; n = lseq[0] };
              acknowledged_by(0,WA);                                                        /* W1, of its own leases */
#if NR > 1
              acknowledged_by(1,WA);
#endif
              atomic { if :: open -> go = 0; open = 0 :: else -> lseq[0] = 0 fi; n = 0 }    /* C1: */
           :: atomic { lseq[0] == 0 -> skip }
        fi;
#endif
        GLANCE
#ifdef MUT_LEASES_BEFORE_W2
        w3f();
#endif
        if :: atomic { go -> skip };
                atomic { st = EVICTING; FORGET_RANKS };                             /* W2: what was probed before is void */
#ifdef MUT_LEASES_BEFORE_PINS
                w3f();
#endif
#ifdef MUT_RANKS_BEFORE_HOLDS
                w3_ranks(); w3h();
#else
                w3h(); w3_ranks();                                                  /* all of W3h, then all of W3 */
#endif
#if !defined(MUT_LEASES_BEFORE_W2) && !defined(MUT_LEASES_BEFORE_PINS)
                if :: atomic { go -> skip }; w3f() :: atomic { !go -> skip } fi;
#endif
                if :: atomic { go -> skip }; set_free()
                   :: atomic { !go -> skip }; st = LIVE                             /* W5: */
                fi
           :: atomic { !go -> skip }
        fi
}

/* B is dead, or would find the lease complete. */
#define DONE_BY(r,e) (!FOR(lgroup[e],r) || ACK(r,e) == lseq[e] || BASE(r,WB) > lseq[e] || !lock[r])
#define ENDED(e) (!wlock[WB] || SHUT(e) || lslot[e] == ELSEWHERE || (DONE_BY(0,e) && DONE_BY(NR-1,e)))

#define PROMISE_A(r) O(r,h) = g_up[r]; D(r,h) = MAY(r,WA); SENT(r,h) = 1

proctype WriterA() provided (dying == NOBODY || dying == THE_A)
{
        byte i, e, n, g, x, k, h; bool go, open, moved, gone[NR], bgone;
#if defined(MUT_PIN_VERDICT_KEPT) || defined(MUT_LEASE_VERDICT_KEPT)
        bool kept;
#endif
        goto attached;
again:
        {
                wlock[WA] = 1;                                                      /* V0: */
                atomic { if :: st == WRITING -> st = FREE :: st == EVICTING -> st = LIVE :: else fi };      /* V1: V2: */
attached:       do
                :: atomic { st == FREE && nextid <= MAXID -> st = WRITING; nextid++ };      /* P1: P2: */
                   id = nextid-1;                                                   /* P2: */
                   atomic { st = LIVE; g_whole = id }                               /* P4: */
                :: atomic { i < AOPS && st == LIVE -> i++ }; evict(); atomic { go = 0; FORGET }
#if MAXA
                :: atomic { i < AOPS && st == LIVE && lseq[0] == 0 && nextseq[WA] <= MAXA -> i++;
                            lseq[0] = nextseq[WA]; h = MAXB + nextseq[WA]; nextseq[WA]++; published[WA] = nextseq[WA];
                            g_id[h] = id; g_entry[h] = 0; PROMISE_A(0); SECOND(PROMISE_A(1)); h = 0 }       /* L1: L2: L3: */
                :: atomic { i < AOPS && lseq[0] != 0 -> i++; h = MAXB + lseq[0]; lseq[0] = 0;
                            SETTLED(0,h); SECOND(SETTLED(1,h)); h = 0 }             /* C1: */
#endif
                :: atomic { i == AOPS || (st == FREE && nextid > MAXID) -> i = 0; adone = 1; break }
                od;
                skip
        } unless { dying == THE_A };
        if :: atomic { dying == THE_A ->
                i = 0; e = 0; n = 0; g = 0; x = 0; k = 0; go = 0; open = 0; moved = 0; FORGET;
                wlock[WA] = 0; dying = NOBODY }; goto again
           /* The end: B is dead or idle; each rank is dead, or has taken or released all that it was promised. */
           :: atomic { adone && bdone && rdone[0] && rdone[NR-1] -> final = 1 };
              if :: atomic { st == LIVE -> skip }; evict(); assert(go)              /* reclaimable */
                 :: atomic { st != LIVE -> skip }
              fi;
              atomic { open = !(slow || (ENDED(1) && ENDED(NB))); assert(!open) }     /* B's entries, too */
        fi
}

init
{
        atomic {
                run Reader(0); SECOND(run Reader(1));
                run WriterA(); run WriterB(); run Killer();
#ifdef MUT_B1_RELAXED
                run BufB();
#endif
#ifdef MUT_REUSE_UNFENCED
                run BufC();
#endif
        }
}
