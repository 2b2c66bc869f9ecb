"""Attention in Gluon for Hopper cards (sm_90): wgmma, TMA, and warps that specialise. See docs/hopper.md."""
