"""The paper's figures beside what the simulator predicts for its settings."""
