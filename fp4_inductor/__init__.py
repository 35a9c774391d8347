"""torch.compile backend that runs mixture-of-experts models with FP4 expert weights on fused kernels."""
