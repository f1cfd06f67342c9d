//! Attention on NVIDIA GPUs.
mod abi;
