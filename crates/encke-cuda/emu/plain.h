// What `plain.cu` needs beside the model: element types, shared memory and arithmetic.
#pragma once
#include "emu.h"
#define __shared__ static   // one block runs at a time
#define PLAIN_SHARED double* raw = (double*)emu::cta->memory
using std::exp; using std::log; using std::tanh; using std::fma;
static inline double __dmul_rn(double a, double b) { return a * b; }
#if defined(T_F64)
typedef double T; typedef double A;
#elif defined(T_F32)
typedef float T; typedef float A;
#else
struct T { u16 bits; };
typedef float A;
static inline void narrow(float x, T& to) { to.bits = emu::narrow(x); }
static inline float widen(T x) { return emu::widen(x.bits); }
#endif
static inline void narrow(double x, double& to) { to = x; }
static inline void narrow(float x, float& to) { to = x; }
static inline double widen(double x) { return x; }
static inline float widen(float x) { return x; }

#define OWN_ELEMENTS
typedef T Element;
typedef A Sum;
static double value_of(Element x) { return widen(x); }
static Element element_of(double x) { Element y; narrow((A)x, y); return y; }
