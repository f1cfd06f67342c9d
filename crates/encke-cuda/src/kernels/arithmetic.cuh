// PTX arithmetic of the tensor core kernels: approximate exponentials, and packed pairs of the
// storage type (T_BF16 or T_F16). The emulator (`emu/emu.h`) has the same functions.
#ifndef EMULATED
DEV float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The type's name in PTX, and two values rounded to it, the first in the low half.
#ifdef T_F16
#define ELEMENT "f16"
DEV u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEV float unpack(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
#else
#define ELEMENT "bf16"
DEV u32 pack(float low, float high) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
DEV float unpack(u16 x) { return __uint_as_float((u32)x << 16); }
#endif
// The same value, opaque to the optimizer: expressions of it are computed where they are used, not
// hoisted out of a loop into registers.
template <class N> DEV N opaque(N x) { asm volatile("" : "+r"(x)); return x; }
#endif
