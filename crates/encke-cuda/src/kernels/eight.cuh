// Eight numbers that are read or written at once: rows whose dimension is a multiple of eight lie so that this is allowed.
struct __align__(16) Eight { T x[8]; };
