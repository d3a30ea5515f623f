"""The vDNN paper (Rhu and others, MICRO 2016): its rules by shapes, its policies on its card, its table with ours."""
