// The storage type T, the accumulator type A, and conversions between them, which round to nearest
// once.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

DEV double widen(double x) { return x; }
DEV float widen(float x) { return x; }
DEV float widen(bf16 x) { return __int_as_float((u32)x.bits << 16); }
DEV float widen(f16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }

DEV void narrow(double x, double& to) { to = x; }
DEV void narrow(float x, double& to) { to = x; }
DEV void narrow(float x, float& to) { to = x; }
DEV void narrow(double x, float& to) { to = __double2float_rn(x); }
DEV void narrow(float x, bf16& to) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
DEV void narrow(float x, f16& to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
// From double to a 16-bit type through f32 rounded to odd, which avoids double rounding.
DEV float to_odd(double x) {
  float y = __double2float_rz(x);
  return (double)y == x || x != x ? y : __int_as_float(__float_as_int(y) | 1);
}
DEV void narrow(double x, bf16& to) { narrow(to_odd(x), to); }
DEV void narrow(double x, f16& to) { narrow(to_odd(x), to); }

#if defined(T_F64)
typedef double T; typedef double A;
#elif defined(T_F32)
typedef float T; typedef float A;
#elif defined(T_BF16)
typedef bf16 T; typedef float A;
#elif defined(T_F16)
typedef f16 T; typedef float A;
#endif
