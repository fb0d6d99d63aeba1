/*
 * refusal.pml - a refusal is remembered (refusal_prepare, refuse and refusal_stands in reclaim.c).  It must never stand
 * for good when a new search would succeed.
 *
 * One object with one open lease, two ranks that pin, acknowledge, release, close (with or without a view of another
 * object that keeps the lock), die and attach again; a writer that
 * wants the object's space, searches in vain and remembers.  When everybody has come to rest, it is asked again: if the
 * refusal stands then, it stands for good, and a search must be in vain.  (In passing it may stand too long: a rank
 * between R4 and its count, or between A2 and A3, is about to change that, or dies, which changes it, too.)  One
 * search is enough to look at: a second one forgets all that the first has noted.
 */
#ifndef NR
#define NR 1                            /* ranks, 1 or 2 */
#endif
#ifndef DEATHS
#define DEATHS 2                        /* kills and closes together */
#endif
#ifndef ROPS
#define ROPS 2
#endif
#define UNKNOWN 0
#define HERE 1
#define GONE 2
#define LEASE 1                         /* the object's lease; a rank that attaches again has base LEASE + 1 */

byte pins[NR]; bool ack[NR]; byte base[NR]; byte epoch[NR]; byte releases[NR]; bool lock[NR];
bool cancelled; byte books;
byte dying = 2; byte deaths; bool rest[NR]; bool done;          /* dying: rank 0, rank 1, or nobody */

#if NR > 1
#define SECOND(what) what
#else
#define SECOND(what) skip
#endif

#ifdef MUT_RELEASE_FIRST
#define LET_GO(r, what) releases[r]++; what
#elif defined(MUT_UNCOUNTED)
#define LET_GO(r, what) what
#else
#define LET_GO(r, what) what; releases[r]++
#endif

proctype Reader(byte r) provided (dying == 2 || dying + 2 == _pid)
{
        byte n; bool held, closed;
again:
        {
                lock[r] = 1;                                                        /* A1: */
                pins[r] = 0;                                                        /* A2: */
                epoch[r]++;                                                         /* A3: */
                if :: atomic { epoch[r] > 1 -> base[r] = LEASE + 1 }                /* A4: */
                   :: atomic { epoch[r] == 1 -> skip }
                fi;
                do
                :: atomic { n < ROPS && !held && !closed -> n++; pins[r]++; held = 1 }         /* R1: */
                :: atomic { held -> held = 0 }; LET_GO(r, pins[r]--)                /* R4: */
                :: atomic { n < ROPS && !ack[r] && base[r] <= LEASE && !cancelled && !closed -> n++ }; LET_GO(r, ack[r] = 1)     /* R3b: */
                :: atomic { deaths < DEATHS && !closed -> deaths++; closed = 1; base[r] = LEASE + 1 }  /* E1: a view of another */
                :: atomic { true -> n = 0; rest[r] = 1; break }
                od;
                done
        } unless { dying == r };
        if :: atomic { dying == r -> lock[r] = 0; dying = 2; held = 0; closed = 0; n = 0; rest[r] = 0 };
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
           :: done -> break
        od
}

#define IDLE(r) (epoch[r] > 0 && !lock[r])
#define FREED_BY(r) ((cancelled || ack[r] || base[r] > LEASE || IDLE(r)) && (pins[r] == 0 || IDLE(r)))

inline ask(r)              /* rank_gone: epoch, then the probe, once an operation */
{
        if :: atomic { verdict[r] != UNKNOWN -> skip }
           :: atomic { verdict[r] == UNKNOWN -> x = epoch[r] };
              atomic { if :: x > 0 && !lock[r] -> verdict[r] = GONE :: else -> verdict[r] = HERE fi; x = 0 }
        fi;
        atomic { if :: verdict[r] == HERE -> found = 0 :: else fi }
}

inline look(r)             /* W1 and the pins of rank r, as may_go */
{
        if :: atomic { found && !(cancelled || ack[r]) -> skip };
              if :: atomic { base[r] <= LEASE -> skip }; ask(r) :: atomic { base[r] > LEASE -> skip } fi
           :: atomic { !(found && !(cancelled || ack[r])) -> skip }
        fi;
        if :: atomic { found && pins[r] != 0 -> skip }; ask(r) :: atomic { !(found && pins[r] != 0) -> skip } fi
}

inline prepare(r)
{
        f_releases[r] = releases[r];
        f_epoch[r] = epoch[r];
        f_base[r] = base[r]
}

inline refuse(r)           /* count_held asks for verdicts, too */
{
        if :: ask(r) :: true fi;
#ifdef MUT_HERE_NOW
        atomic { f_here[r] = lock[r] }
#else
        atomic { if :: verdict[r] == UNKNOWN -> f_here[r] = lock[r] :: else -> f_here[r] = (verdict[r] == HERE) fi }
#endif
}

inline stands(r)
{
        atomic { if :: releases[r] != f_releases[r] -> known = 0 :: else fi };
#ifndef MUT_NO_EPOCH
        atomic { if :: epoch[r] != f_epoch[r] -> known = 0 :: else fi };
#endif
#ifndef MUT_NO_BASE
        atomic { if :: base[r] != f_base[r] -> known = 0 :: else fi };
#endif
#ifndef MUT_NO_HERE
        atomic { if :: f_epoch[r] != 0 && lock[r] != f_here[r] -> known = 0 :: else fi }
#endif
}

inline search()            /* shms_reclaim_space; found, or known */
{
        atomic { verdict[0] = UNKNOWN; verdict[NR-1] = UNKNOWN; found = 1 };
        if :: ask(0); found = 1 :: SECOND(ask(1)); found = 1 :: true fi;       /* reclaim_lease may have asked before */
#ifndef MUT_PREPARE_LATE
        prepare(0); SECOND(prepare(1)); f_books = books;                        /* refusal_prepare */
#endif
        do
        :: look(0); SECOND(look(1));
           if :: atomic { found -> verdict[0] = UNKNOWN; verdict[NR-1] = UNKNOWN; found = 1 }   /* a pin came: again */
              :: true -> break
           fi
        od;
        if :: atomic { !found -> known = 1 };
#ifdef MUT_PREPARE_LATE
                prepare(0); SECOND(prepare(1)); f_books = books;
#endif
                refuse(0); SECOND(refuse(1)); atomic { found = 0; x = 0 }
           :: atomic { found -> skip }
        fi
}

proctype Writer() provided (dying == 2)
{
        byte verdict[NR]; byte f_releases[NR]; byte f_epoch[NR]; byte f_base[NR]; byte x, n, f_books; bool f_here[NR]; bool found, known;
        do
        :: atomic { n == 0 -> n = 1 }; search();
           if :: atomic { found -> goto end } :: atomic { !found -> skip } fi
        :: atomic { !cancelled -> cancelled = 1;                                    /* C1: shms_writer_cancel */
#ifndef MUT_CANCEL_UNCOUNTED
                    books++
#endif
                  }
        :: atomic { rest[0] && rest[NR-1] -> break }
        od;
        if :: atomic { rest[0] && rest[NR-1] && known -> done = 1 };            /* from here on nothing changes */
              if :: f_books != books -> known = 0 :: else fi; stands(0); SECOND(stands(1));
              assert(!(known && FREED_BY(0) && FREED_BY(NR-1)))
           :: atomic { !known -> skip }
        fi;
end:    done = 1
}

init { atomic { run Writer(); run Reader(0); SECOND(run Reader(1)); run Killer() } }
