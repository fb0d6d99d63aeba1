/*
 * search.pml - what a search remembers by zones (zones.c; shms_poll, gone and shms_evictable in holders.c). A search must
 * never refuse for good if there is room.
 *
 * - One slot and two zones. The slot's first object lies in zone 0 and has one open lease. The writer may evict it and
 *   put a second object into the slot, which lies in zone 1 and has no lease.
 * - Ranks pin, acknowledge, release, close, die and attach again. A closed reader may have a view of another object,
 *   which keeps its lock.
 * - The writer does its steps in any order. So scans come before and after a poll of the ranks, and yields come in
 *   between. Other threads of the writer may do the same.
 * - When all processes have come to rest, the writer polls once more. Everything that it then remembers as held must be
 *   held. Before that it may refuse too much: a rank between R4 and its count, or between A2 and A3, is about to change
 *   that.
 * - With REMOTES, writer B hands the object out at any moment, and may stop for good after its pin. It dies, and is
 *   succeeded. A look-up of B stores nothing, so it is not here. This writer puts again and again, and must not refuse
 *   for a pin for a moment.
 *
 * If a word only grows, and the writer only compares it with the last value that it read, the model has one bit for it.
 * The rank sets the bit when it increments the word. The writer clears the bit when it reads the word.
 *
 * How an object goes, and whether it may, is in protocol.pml.
 */
#ifndef NR
#define NR 1                            /* ranks, 1 or 2 */
#endif
#ifndef DEATHS
#define DEATHS 2                        /* kills and closes of all ranks together */
#endif
#ifndef ROPS
#define ROPS 2                          /* operations of one process of a rank */
#endif
#ifndef PUTS
#define PUTS 0                          /* 1: the first object may be evicted, and a second one put */
#endif
#ifndef RETIRE
#define RETIRE 0                        /* rank 0 may be retired once */
#endif
#ifndef REMOTES
#define REMOTES 0                      /* 1: writer B hands out, and this writer puts; the first object's own lease is over */
#endif
#ifndef BOPS
#define BOPS 2                          /* hand-outs of B */
#endif
#ifndef BDEATHS
#define BDEATHS 1
#endif
#define UNKNOWN 0
#define HERE 1
#define GONE 2
#define ABOVE 1                         /* a base above the lease's number, */
#define CLOSED 2                        /* and one above every number */

#define FREE 0
#define WRITING 1
#define LIVE 2

/* Words of the ranks, and locks held by the kernel. */
byte pins[NR]; bool ack[NR]; byte base[NR]; bool attached[NR]; bool lock[NR];
bool epoch_new[NR]; bool releases_new[NR]; bool zone_new[NR*2];
/* Words of the writer. The object lies in zone `object`. */
byte st = LIVE; bit object; bool cancelled = REMOTES; bool retired[NR]; bool retired_new[NR];
byte dying = 2; byte deaths; bool rest[NR]; bool done;          /* dying: rank 0, rank 1, 2: nobody, or 3: B */
#if REMOTES
bool pinB; bool first; bool lockB = 1; bool releasesB_new; bool zoneB_new[2]; bool epochB_new;  /* words of B */
byte deathsB; bool restB; bool g_stopped; bool g_anew; bool g_uncounted;
/* g_anew: B has pinned, or its successor has come, since the put yielded. g_uncounted: B is between a release and the end
 * of its count, or has died there. */
#define B_RESTS restB
#define HELD_BY_B (lockB && (pinB || first))
#else
#define B_RESTS true
#define HELD_BY_B false
#endif

#if NR > 1
#define SECOND(what) what
#else
#define SECOND(what) skip
#endif
#define Z(r,z) zone_new[(r)*2+(z)]

#ifdef MUT_TOTAL_FIRST
#define COUNT(r, z) releases_new[r] = 1; Z(r,z) = 1
#else
#define COUNT(r, z) Z(r,z) = 1; releases_new[r] = 1
#endif
#if defined(MUT_RELEASE_FIRST)
#define LET_GO(r, z, what) COUNT(r,z); what
#elif defined(MUT_UNCOUNTED)
#define LET_GO(r, z, what) what
#else
#define LET_GO(r, z, what) what; COUNT(r,z)
#endif

inline unpin_failed(r)       /* the pin may have been seen on another object than the intended one */
{
#ifdef MUT_FAILED_EARLY
        x = object;
        pins[r]--;
#else
        pins[r]--;                                                                  /* R4: */
        x = object;                                                                 /* after the fence */
#endif
        COUNT(r,x);
        atomic { x = 0; failed = 0 }
}

proctype Reader(byte r) provided (dying == 2 || dying + 2 == _pid)
{
        byte n; bool held, failed, closed, x; bit mine;
again:
        {
                lock[r] = 1;                                                        /* A1: */
                pins[r] = 0;                                                        /* A2: */
                atomic { x = attached[r] || retired[r]; attached[r] = 1; retired[r] = 0; epoch_new[r] = 1 };    /* A3: */
                if :: atomic { x -> x = 0; base[r] = ABOVE } :: atomic { !x -> base[r] = 0 } fi;    /* A4: */
                do
                :: atomic { n < ROPS && !held && !closed -> n++;
                            if :: mine = 0 :: object == 1 -> mine = 1 fi; pins[r]++ };              /* R1: */
                   atomic { if :: st == LIVE && object == mine -> held = 1 :: else -> failed = 1; mine = 0 fi }   /* R2: */
                :: atomic { held -> held = 0 }; LET_GO(r, mine, pins[r]--); atomic { mine = 0 }     /* R4: */
                :: atomic { failed -> skip }; unpin_failed(r)
                :: atomic { n < ROPS && !ack[r] && base[r] == 0 && !cancelled && !closed && !failed -> n++ };
                   LET_GO(r, 0, ack[r] = 1)                                         /* R3b: */
                :: atomic { deaths < DEATHS && !closed && !failed -> deaths++; closed = 1; base[r] = CLOSED }  /* E1: */
                :: atomic { !failed -> n = 0; rest[r] = 1; break }                    /* perhaps with a view that is never released */
                od;
                done
        } unless { dying == r };
        if :: atomic { dying == r -> lock[r] = 0; dying = 2; held = 0; failed = 0; closed = 0; n = 0; x = 0; mine = 0; rest[r] = 0 };
              if :: true -> goto again
                 :: atomic { true -> rest[r] = 1 }
              fi
           :: done
        fi
}

proctype Killer() provided (dying == 2)
{
        do :: atomic { deaths < DEATHS && !done && lock[0] -> deaths++; dying = 0 }
#if NR > 1
           :: atomic { deaths < DEATHS && !done && lock[1] -> deaths++; dying = 1 }
#endif
#if REMOTES
           :: atomic { deathsB < BDEATHS && !done && lockB -> deathsB++; dying = 3 }
#endif
           :: done -> break
        od
}

#if REMOTES
#ifdef MUT_J2_UNCOUNTED
#define COUNT_J2 skip
#else
#define COUNT_J2 count_B()
#endif

inline count_B() { x = object; zoneB_new[x] = 1; releasesB_new = 1; atomic { x = 0 } }

proctype WriterB() provided (dying == 2 || dying == 3)
{
        byte n; bit mine, x;
        goto joined;
again:
        {
                atomic { lockB = 1; g_anew = 1; g_stopped = 0 };                    /* V0: */
                if :: pinB -> pinB = 0; count_B() :: else fi;                       /* J1: */
                if :: atomic { first -> first = 0; g_uncounted = 1 }; COUNT_J2; atomic { g_uncounted = 0 }
                   :: atomic { !first -> skip }
                fi;                                                                 /* J2: */
                if :: atomic { !g_uncounted -> restB = 1; goto rests }                  /* a start may last */
                   :: atomic { true -> epochB_new = 1; g_uncounted = 0 }
                fi;
joined:         do
#ifdef MUT_LOOK_PINS
                :: pinB = 1; pinB = 0; count_B()                                    /* compares under a pin */
#endif
                :: atomic { n < BOPS && !first && !done -> n++;
                            if :: mine = 0 :: object == 1 -> mine = 1 fi };         /* found, without a pin */
                   atomic { pinB = 1; g_anew = 1 };                                 /* B1: */
                   if :: atomic { st == LIVE && object == mine -> skip };           /* B2a: */
                         first = 1                                                  /* B4: */
                      :: atomic { !(st == LIVE && object == mine) -> skip }
                      :: atomic { true -> g_stopped = 1; restB = 1; goto rests }
                   fi;
                   pinB = 0; count_B(); atomic { mine = 0 }                         /* B5: */
                :: atomic { first -> first = 0; g_uncounted = 1 }; count_B();                 /* C1: C2: */
                   atomic { g_uncounted = 0 }
                :: atomic { true -> restB = 1; n = 0; break }
                od;
rests:          done
        } unless { dying == 3 };
        if :: atomic { dying == 3 -> lockB = 0; dying = 2; n = 0; mine = 0; x = 0; restB = 0 };
              if :: true -> goto again
                 :: atomic { true -> restB = 1 }
              fi
           :: done
        fi
}
#endif

#define IDLE(r) (attached[r] && !lock[r])
#define LEFT_BY(r) (object == 1 || cancelled || ack[r] || base[r] != 0 || retired[r] || IDLE(r))
#define FREED_BY(r) (LEFT_BY(r) && (pins[r] == 0 || IDLE(r)))
#define FREED (FREED_BY(0) && FREED_BY(NR-1) && !HELD_BY_B)

/* The writer's private memory; see zones.h and shms_polled. */
bool stale[2] = 1; bool held[2];
byte h_base[NR]; byte h_verdict[NR] = HERE;  /* as of the last poll; UNKNOWN: it has turned since */
byte verdict[NR]; byte last[NR] = HERE;      /* of this operation; of any */
bool blamed[NR];      /* found here since all zones became stale: only these are polled for their death */
#if REMOTES
byte verdictB; byte lastB = HERE; byte h_verdictB = HERE; bool blamedB; bool met; bool again;
#define FORGIVE blamed[0] = 0; blamed[NR-1] = 0; blamedB = 0
#define FORGET verdict[0] = UNKNOWN; verdict[NR-1] = UNKNOWN; verdictB = UNKNOWN
#else
#define FORGIVE blamed[0] = 0; blamed[NR-1] = 0
#define FORGET verdict[0] = UNKNOWN; verdict[NR-1] = UNKNOWN            /* shms_reclaim_begin, yield_mutex */
#endif

#ifdef MUT_BLAMED_ONCE
#define BLAME_AGAIN(r) skip
#else
#define BLAME_AGAIN(r) if :: verdict[r] == HERE -> blamed[r] = 1 :: else fi
#endif

inline ask(r)              /* gone */
{
        if :: atomic { verdict[r] != UNKNOWN -> BLAME_AGAIN(r) }
           :: atomic { verdict[r] == UNKNOWN -> x = attached[r] };                    /* W1b: */
              atomic { if :: x && !lock[r] -> verdict[r] = GONE :: else -> verdict[r] = HERE; blamed[r] = 1 fi; x = 0; last[r] = verdict[r];     /* W1c: */
#ifndef MUT_VERDICT_UNPOLLED
                       if :: verdict[r] != h_verdict[r] -> h_verdict[r] = UNKNOWN :: else fi
#endif
                     }
        fi
}

#define NEWS(what) if :: what -> news = 1; what = 0 :: else fi

inline poll_rank(r)
{
#ifndef MUT_NO_EPOCH
        atomic { NEWS(epoch_new[r]) };
#endif
#ifndef MUT_NO_BASE
        atomic { if :: base[r] != h_base[r] -> news = 1; h_base[r] = base[r] :: else fi };
#endif
#ifndef MUT_NO_RETIRED
        atomic { NEWS(retired_new[r]) };
#endif
        atomic { if :: releases_new[r] -> count = 1; releases_new[r] = 0 :: else fi };
#ifndef MUT_NO_GONE
        if :: atomic { blamed[r] -> skip }; ask(r) :: atomic { !blamed[r] -> skip } fi;
        atomic { if :: last[r] != h_verdict[r] -> news = 1; h_verdict[r] = last[r] :: else fi };
#endif
        atomic { if :: news -> stale[0] = 1; stale[1] = 1; count = 1; FORGIVE :: else fi; news = 0 };
        if :: atomic { count -> if :: Z(r,0) -> stale[0] = 1; Z(r,0) = 0 :: else fi };
              atomic { if :: Z(r,1) -> stale[1] = 1; Z(r,1) = 0 :: else fi; count = 0 }
           :: atomic { !count -> skip }
        fi
}

#if REMOTES
inline ask_B()             /* writer_gone */
{
        atomic { if :: verdictB == UNKNOWN ->
                       if :: lockB -> verdictB = HERE :: else -> verdictB = GONE fi; lastB = verdictB;       /* W3w: */
                       if :: verdictB != h_verdictB -> h_verdictB = UNKNOWN :: else fi
                    :: else fi;
                 if :: verdictB == HERE -> blamedB = 1 :: else fi }
}

inline poll_B()
{
        atomic { x = epochB_new; epochB_new = 0 };
        atomic { NEWS(releasesB_new) };
        if :: atomic { blamedB -> skip }; ask_B() :: atomic { !blamedB -> skip } fi;
        atomic { if :: lastB != h_verdictB || x -> stale[0] = 1; stale[1] = 1; news = 1; h_verdictB = lastB; FORGIVE
                    :: else fi; x = 0 };
        if :: atomic { news -> news = 0; if :: zoneB_new[0] -> stale[0] = 1; zoneB_new[0] = 0 :: else fi };
              atomic { if :: zoneB_new[1] -> stale[1] = 1; zoneB_new[1] = 0 :: else fi }
           :: atomic { !news -> skip }
        fi
}

inline look_B()            /* as in held_by */
{
        if :: atomic { free && pinB -> skip };                                      /* W3h: */
              ask_B(); atomic { if :: verdictB == HERE -> free = 0; met = 1 :: else fi }
           :: atomic { !(free && pinB) -> skip }
        fi;
        if :: atomic { (free || met) && first -> skip };                            /* W3f: */
              ask_B(); atomic { if :: verdictB == HERE -> free = 0; met = 0 :: else fi }
           :: atomic { !((free || met) && first) -> skip }
        fi
}

inline put()               /* looks for the place of the object */
{
        atomic { again = 0; met = 0 };
search: poll_ranks();
        if :: atomic { stale[object] -> skip }; scan() :: atomic { !stale[object] -> skip } fi;
        if :: atomic { held[object] -> skip };
#ifndef MUT_NO_SECOND_SEARCH
              if :: atomic { met && !again -> again = 1; met = 0 };
                    atomic { !pinB || g_stopped || !lockB -> g_anew = 0 };          /* yields: what runs goes on */
                    goto search
                 :: atomic { !met || again -> skip }
              fi;
#endif
              atomic { assert(!met || g_stopped || (again && g_anew)) }                 /* refuses */
           :: atomic { !held[object] -> skip }
        fi;
        atomic { again = 0; met = 0 }
}
#define POLL_B poll_B()
#define LOOK_B look_B()
#else
#define POLL_B skip
#define LOOK_B skip
#endif

inline poll_ranks() { atomic { FORGET }; poll_rank(0); SECOND(poll_rank(1)); POLL_B }

inline look(r)             /* W1 and the pins of rank r, as in evictable; clears free */
{
        if :: atomic { free && object == 0 && !cancelled && !ack[r] -> skip };      /* W1a: */
              if :: atomic { base[r] == 0 -> skip };
                    if :: atomic { !retired[r] -> skip };
                          ask(r); atomic { if :: verdict[r] == HERE -> free = 0 :: else fi }
                       :: atomic { retired[r] -> skip }
                    fi
                 :: atomic { base[r] != 0 -> skip }
              fi
           :: atomic { !(free && object == 0 && !cancelled && !ack[r]) -> skip }
        fi;
        if :: atomic { free && pins[r] != 0 -> skip };
              ask(r); atomic { if :: verdict[r] == HERE -> free = 0 :: else fi }
           :: atomic { !(free && pins[r] != 0) -> skip }
        fi
}

#if REMOTES && !defined(MUT_PIN_REMEMBERED)
#define KEEP_STALE if :: met -> stale[object] = 1 :: else fi          /* a pin for a moment is not remembered */
#else
#define KEEP_STALE
#endif

inline scan()            /* of the object's zone; the other zone has nothing that could be held */
{
        atomic { stale[object] = 0; free = (st == LIVE) };
        look(0); SECOND(look(1)); LOOK_B;
        atomic { held[object] = !free; free = 0; KEEP_STALE }
}

#ifdef MUT_CANCEL_UNMARKED
#define MARK_CANCEL skip
#else
#define MARK_CANCEL stale[0] = 1
#endif
#ifdef MUT_COMMIT_UNMARKED
#define MARK_COMMIT skip
#else
#define MARK_COMMIT stale[1] = 1
#endif

proctype Writer() provided (dying == 2)
{
        bool x, free, news, count, once;
        do
#if REMOTES
        :: atomic { st == LIVE -> skip }; put()
#else
        :: poll_ranks()
        :: atomic { st != FREE && stale[object] -> skip }; scan()
        :: atomic { verdict[0] != UNKNOWN || verdict[NR-1] != UNKNOWN -> FORGET }   /* another operation, or a yield */
#endif
        :: atomic { st == LIVE && object == 0 && !cancelled -> cancelled = 1; MARK_CANCEL }     /* C1: */
#if RETIRE
        :: atomic { !once -> once = 1; retired[0] = 1; retired_new[0] = 1 }         /* T1: T2: */
#endif
#if PUTS
        :: atomic { st == LIVE && object == 0 && FREED -> st = FREE }               /* W2 to W4: */
        :: atomic { st == FREE -> st = WRITING; object = 1; stale[1] = 1 }          /* P2: */
        :: atomic { st == WRITING -> st = LIVE; MARK_COMMIT }                       /* P4: */
#endif
        :: atomic { rest[0] && rest[NR-1] && B_RESTS -> break }
        od;
        if :: atomic { rest[0] && rest[NR-1] && B_RESTS && st == LIVE -> done = 1 };    /* nothing changes from here on */
              poll_ranks();
              assert(!(held[object] && !stale[object] && FREED))
           :: atomic { st != LIVE -> done = 1 }
        fi
}

init { atomic { run Writer(); run Reader(0); SECOND(run Reader(1)); run Killer();
#if REMOTES
                run WriterB()
#endif
        } }
