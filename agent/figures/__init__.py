"""Figures of models, GPUs, enclosures and pods, each with its source and date: one table for all verbs."""
