/* scheduler.h - a scheduler over a session of the caller's; nibble.h says what schedulers do. */
#pragma once

#include "infer/session.h"

/* A scheduler of one slot over a session, which is borrowed. It obeys the wish to stop of the
 * thread that runs it, not the session's. */
enum nb_status nbi_scheduler_open_over(struct nb_scheduler **out, struct nb_session *session);

/* Ends all requests with a status whose message is stored; NB_OK: with NB_EINTERRUPTED, as
 * cancelled. */
void nbi_scheduler_end(struct nb_scheduler *s, enum nb_status rc);
