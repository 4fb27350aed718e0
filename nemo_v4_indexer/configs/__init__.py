"""Hydra configurations. This file makes `pkg://nemo_v4_indexer.configs` resolve from a wheel as from a checkout."""
