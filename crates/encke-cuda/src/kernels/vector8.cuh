// Eight elements that are loaded or stored at once. Rows whose dimension is a multiple of eight are
// aligned for it.
struct __align__(16) Vector8 { T x[8]; };
