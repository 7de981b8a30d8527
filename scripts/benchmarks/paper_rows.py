"""The numbers that the papers print, read from their tables and sentences. Facts only, nothing computed.

Ring Attention: Liu, Zaharia, Abbeel, arXiv 2310.01889. Striped Attention: Brandon et al., arXiv 2311.09431. DistFlashAttn: Li,
Shao et al., arXiv 2310.03294. Attention2D: Elango, 2025.
"""

# Striped Attention. (table, hardware, model, tensor shards, sequence shards): ((tokens, theoretical maximum speedup,
# measured speedup), ...). Table 5 gives tokens a device instead of tokens.
STRIPED_ATTENTION = {
    ("Table 3", "A100", "llama-1b", 2, 4): (
        (16384, 1.46, 0.95),
        (32768, 1.57, 1.07),
        (65536, 1.65, 1.22),
        (98304, 1.68, 1.30),
        (131072, 1.70, 1.35),
        (196608, 1.71, 1.40),
        (262144, 1.72, 1.41),
    ),
    ("Table 3", "A100", "llama-3b", 2, 4): (
        (16384, 1.38, 0.94),
        (32768, 1.51, 1.09),
        (65536, 1.61, 1.23),
        (98304, 1.65, 1.32),
        (131072, 1.67, 1.36),
        (196608, 1.69, 1.43),
        (262144, 1.71, 1.45),
    ),
    ("Table 3", "A100", "llama-7b", 2, 4): (
        (16384, 1.34, 0.94),
        (32768, 1.47, 1.07),
        (65536, 1.58, 1.23),
        (98304, 1.62, 1.30),
        (131072, 1.65, 1.36),
        (196608, 1.68, 1.39),
        (262144, 1.70, 1.43),
    ),
    ("Table 4", "TPU v4", "llama-1b", 2, 8): (
        (32768, 1.54, 1.06),
        (131072, 1.76, 1.26),
        (262144, 1.81, 1.37),
        (393216, 1.83, 1.43),
        (524288, 1.84, 1.47),
        (655360, 1.85, 1.49),
        (786432, 1.85, 1.51),
    ),
    ("Table 4", "TPU v4", "llama-3b", 2, 8): (
        (32768, 1.45, 1.09),
        (131072, 1.71, 1.36),
        (262144, 1.78, 1.50),
        (393216, 1.81, 1.57),
        (524288, 1.83, 1.60),
        (655360, 1.84, 1.63),
        (786432, 1.84, 1.65),
    ),
    ("Table 4", "TPU v4", "llama-7b", 2, 8): (
        (32768, 1.40, 1.07),
        (131072, 1.67, 1.30),
        (262144, 1.76, 1.44),
        (393216, 1.80, 1.51),
        (524288, 1.81, 1.56),
        (655360, 1.83, 1.59),
    ),
    ("Table 5", "A100", "llama-1b", 1, 2): (
        (4096, 1.22, 0.94),
        (8192, 1.31, 1.02),
        (16384, 1.38, 1.10),
        (24576, 1.41, 1.14),
    ),
    ("Table 5", "A100", "llama-1b", 1, 4): (
        (4096, 1.46, 0.92),
        (8192, 1.57, 1.07),
        (16384, 1.65, 1.23),
        (24576, 1.68, 1.31),
    ),
    ("Table 5", "A100", "llama-1b", 1, 8): (
        (4096, 1.67, 0.93),
        (8192, 1.76, 1.11),
        (16384, 1.81, 1.29),
        (24576, 1.83, 1.37),
    ),
    ("Appendix A", "A100", "llama-1b", 1, 2): (
        (8192, 1.22, 0.94),
        (16384, 1.31, 1.02),
        (32768, 1.38, 1.10),
        (49152, 1.41, 1.14),
        (65536, 1.43, 1.19),
        (98304, 1.45, 1.22),
        (131072, 1.46, 1.25),
    ),
    ("Appendix A", "A100", "llama-1b", 1, 4): (
        (16384, 1.46, 0.92),
        (32768, 1.57, 1.07),
        (65536, 1.65, 1.23),
        (98304, 1.68, 1.31),
        (131072, 1.70, 1.35),
        (196608, 1.71, 1.39),
    ),
    ("Appendix A", "A100", "llama-1b", 1, 8): (
        (32768, 1.67, 0.93),
        (65536, 1.76, 1.11),
        (131072, 1.81, 1.29),
        (196608, 1.83, 1.37),
    ),
    ("Appendix A", "A100", "llama-1b", 2, 2): (
        (8192, 1.22, 0.94),
        (16384, 1.31, 1.04),
        (32768, 1.38, 1.11),
        (49152, 1.41, 1.18),
        (65536, 1.43, 1.21),
        (98304, 1.45, 1.25),
        (131072, 1.46, 1.25),
    ),
    ("Appendix A", "A100", "llama-1b", 2, 4): (
        (16384, 1.46, 0.95),
        (32768, 1.57, 1.07),
        (65536, 1.65, 1.22),
        (98304, 1.68, 1.30),
        (131072, 1.70, 1.35),
        (196608, 1.71, 1.40),
        (262144, 1.72, 1.41),
    ),
    ("Appendix A", "A100", "llama-1b", 4, 2): (
        (8192, 1.22, 0.96),
        (16384, 1.31, 1.06),
        (32768, 1.38, 1.11),
        (49152, 1.41, 1.15),
        (65536, 1.43, 1.20),
        (98304, 1.45, 1.23),
        (131072, 1.46, 1.24),
    ),
    ("Appendix A", "A100", "llama-3b", 2, 2): (
        (8192, 1.17, 0.96),
        (16384, 1.26, 1.04),
        (32768, 1.34, 1.11),
        (49152, 1.38, 1.18),
        (65536, 1.40, 1.22),
        (98304, 1.43, 1.25),
        (131072, 1.45, 1.27),
    ),
    ("Appendix A", "A100", "llama-3b", 2, 4): (
        (16384, 1.38, 0.94),
        (32768, 1.51, 1.09),
        (65536, 1.61, 1.23),
        (98304, 1.65, 1.32),
        (131072, 1.67, 1.36),
        (196608, 1.69, 1.43),
        (262144, 1.71, 1.45),
    ),
    ("Appendix A", "A100", "llama-3b", 4, 2): (
        (8192, 1.17, 0.97),
        (16384, 1.26, 1.04),
        (32768, 1.34, 1.13),
        (49152, 1.38, 1.20),
        (65536, 1.40, 1.22),
        (98304, 1.43, 1.26),
        (131072, 1.45, 1.27),
    ),
    ("Appendix A", "A100", "llama-7b", 2, 2): (
        (8192, 1.15, 0.93),
        (16384, 1.23, 1.03),
        (32768, 1.31, 1.11),
        (49152, 1.36, 1.16),
        (65536, 1.38, 1.20),
        (98304, 1.42, 1.23),
        (131072, 1.43, 1.25),
    ),
    ("Appendix A", "A100", "llama-7b", 2, 4): (
        (16384, 1.34, 0.94),
        (32768, 1.47, 1.07),
        (65536, 1.58, 1.23),
        (98304, 1.62, 1.30),
        (131072, 1.65, 1.36),
        (196608, 1.68, 1.39),
        (262144, 1.70, 1.43),
    ),
    ("Appendix A", "A100", "llama-7b", 4, 2): (
        (8192, 1.15, 0.98),
        (16384, 1.23, 1.03),
        (32768, 1.31, 1.12),
        (49152, 1.36, 1.18),
        (65536, 1.38, 1.20),
        (98304, 1.42, 1.23),
        (131072, 1.43, 1.25),
    ),
}
# Table 2, measured at 262144 tokens: (A100 at 2 x 4, TPU v4 at 2 x 8). For 1B on TPU v4 Table 4 says 1.37.
STRIPED_TABLE_2 = {"llama-1b": (1.41, 1.39), "llama-3b": (1.45, 1.50), "llama-7b": (1.43, 1.44)}
# Section 3.1: queries x keys of a tile.
STRIPED_TILES = {"A100": (2048, 4096), "TPU v4": (2048, 2048)}
STRIPED_VOCABULARY = 32000

# Ring Attention, Table 1: bytes a layer in bfloat16 as (b, h, n, s, c) -> text, as printed.
RING_TABLE_1 = {
    "vanilla": "2bhs^2",
    "memory efficient attention": "8bsh",
    "memory efficient attention and feed-forward": "2bsh",
    "Ring Attention": "6bch",
}
# Table 2: TFLOP/s and GB/s (the table's own inputs), minimal block and minimal sequence, both in thousands of tokens.
RING_TABLE_2 = {
    "A100 NVLink": (312, 300, 1.0, 6.2),
    "A100 InfiniBand": (312, 12.5, 24.8, 149.6),
    "TPU v3": (123, 112, 1.1, 6.6),
    "TPU v4": (275, 268, 1.0, 6.2),
    "TPU v5e": (196, 186, 1.1, 6.3),
}
# Appendix C: hidden sizes of Figure 5, and the only ratio that the text spells out ("170B ... 162.6x", "3072 times longer").
RING_FIGURE_5_HIDDEN = {
    "LLaMA-7B": 4096,
    "LLaMA-13B": 5140,
    "LLaMA-33B": 7168,
    "LLaMA-65B": 8192,
    "GPT3-175B": 12288,
    "1TB": 36864,
}
RING_FIGURE_5_RATIO = ("GPT3-175B", 3072, 162.6)
RING_FIGURE_5_MILLION = (
    "LLaMA-7B",
    256,
    (20, 40),
)  # "small models to a 1M context ... approximately 20-40 times"

# DistFlashAttn. Table 1: (nodes, thousand tokens a GPU): seconds of Megatron-LM and DistFlashAttn.
DISTFLASH_TABLE_1 = {
    "llama-7b": {
        (1, 8): (6.81, 5.98),
        (1, 16): (20.93, 17.26),
        (1, 32): (72.75, 58.46),
        (2, 8): (14.26, 12.75),
        (2, 16): (43.44, 30.21),
        (2, 32): (147.06, 106.37),
    },
    "llama-gqa": {
        (1, 8): (6.60, 5.61),
        (1, 16): (20.53, 16.86),
        (1, 32): (71.93, 57.01),
        (2, 8): (14.21, 9.74),
        (2, 16): (43.20, 28.49),
        (2, 32): (146.38, 102.34),
    },
    "llama-33h": {
        (1, 8): (8.37, 6.08),
        (1, 16): (25.75, 17.77),
        (1, 32): (90.21, 59.96),
        (2, 8): (20.63, 13.12),
        (2, 16): (62.78, 31.33),
        (2, 32): (216.70, 107.76),
    },
}
# Table 3: (nodes, thousand tokens in all): seconds of Ring Self-Attention and DistFlashAttn.
DISTFLASH_TABLE_3 = {(1, 32): (14.10, 2.50), (2, 64): (30.49, 6.85)}
# Table 4: (nodes, thousand tokens a GPU): seconds of DeepSpeed-Ulysses and DistFlashAttn, LLaMA-7B; the other half is lost but
# for the largest speed-up of LLaMA-33H (section 4.5).
DISTFLASH_TABLE_4 = {(2, 16): (37.53, 30.21), (2, 32): (134.09, 106.37)}
DISTFLASH_TABLE_4_33H = 1.88
# Table 5 (its body is lost; section 4.6): speed-up by remat, by thousands of tokens a GPU.
DISTFLASH_TABLE_5 = {8: 1.16, 16: 1.24, 32: 1.31}
# Figure 5, as far as section 4.6 says: speed-ups over one GPU where the curves saturate, expected and measured, 8 GPUs;
# overhead of communication at 128K on 2 x 8 GPUs, in sequence and overlapped, and overlapped at the two longer lengths.
DISTFLASH_FIGURE_5 = {"ring": (4.5, 4.5), "balanced": (7.2, 7.5)}
DISTFLASH_OVERHEAD = {"in sequence": {128: 1.05}, "overlapped": {128: 0.44, 256: 0.08, 512: 0.01}}
DISTFLASH_OVERLAP_SPEEDUP = 1.32  # introduction: end to end, against not overlapping (Figure 5)
DISTFLASH_FIGURE_4_SECONDS = (
    0.23  # section 3.3: attention forward of one layer, 64K tokens, LLaMA-7B, one A100 40 GB
)
# Appendix C: communication of a step in N d; and how many times less it is.
DISTFLASH_VOLUME = {"DistFlashAttn": 3, "Megatron-LM": 14}
DISTFLASH_IDLE = {"even": "1/(2P)", "odd": "0"}

# Attention2D, Table 3: layers, heads, head size, hidden size.
ATTENTION2D_MODELS = {
    "760M": (24, 16, 96, 1536),
    "2.7B": (32, 32, 80, 2560),
    "13B": (40, 40, 128, 5120),
    "66B": (64, 72, 128, 9216),
    "175B": (96, 96, 128, 12288),
}
# Speed-ups over Ring Attention that its text and abstract state; the figures' curves, lengths and batch sizes are lost.
ATTENTION2D_SPEEDUP = {
    "Figure 4, 64 A100 on 16 nodes, at most": 5.0,
    "Figure 4, every model and length, at least": 2.0,
    "Figure 6, 64 H100 on 64 nodes, at most": 9.4,
}

NOT_NUMBERS = {
    "Ring Attention Table 4 (model FLOPs utilisation)": "a picture whose numbers are not in the text at hand",
    "Ring Attention Figure 3 (line retrieval)": "curves only; and not a matter of cost",
    "Ring Attention Table 3 (largest context)": "memory, not time: the compiler's plan says it (scripts/plan.py)",
    "Ring Attention Table 5 (ExoRL)": "returns of a policy, not a matter of cost",
    "DistFlashAttn Table 2 (few heads)": "its body is not in the text at hand",
    "DistFlashAttn Table 4, LLaMA-33H": "its half of the body is lost but for the speed-up in section 4.5",
    "DistFlashAttn Table 6 (pipeline memory)": "memory of Megatron's pipeline stages, which this project does not have",
    "Striped Attention Figure 6 (tokens per second)": "bars whose numbers are not in the text at hand",
    "Attention2D Figures 4, 5, 6": "bars and curves without numbers but for the three that its text and abstract state",
}

# Ring Attention, Table 3: the longest context in thousands of tokens, by its columns. "TPUv3-512" is 512 cores; "TPUv4-512" is
# given a gain of 512, and Google's own v4-512 is 256 chips: hence both.
RING_ATTENTION_COLUMNS = ("vanilla", "memory-efficient", "blockwise feed-forward", "ring")
_V4 = {
    "llama-3b": (8, 64, 256, 131072),
    "llama-7b": (8, 32, 128, 65536),
    "llama-13b": (4, 16, 64, 32768),
    "llama-30b": (2, 8, 32, 16384),
}
RING_ATTENTION_CONTEXTS = {
    "a100:8": {
        "llama-3b": (16, 256, 512, 4096),
        "llama-7b": (16, 256, 512, 4096),
        "llama-13b": (8, 128, 256, 2048),
        "llama-30b": (8, 64, 256, 2048),
    },
    "a100:4x8": {"llama-7b": (32, 512, 1024, 32768), "llama-30b": (16, 128, 512, 16384)},
    "v3:16x16": {
        "llama-7b": (4, 16, 64, 16384),
        "llama-13b": (2, 8, 32, 8192),
        "llama-30b": (1, 4, 16, 4096),
    },
    "v4:8x8x4": _V4,
    "v4:8x8x8": _V4,
    "v5e:16x16": {"llama-7b": (4, 16, 64, 16384), "llama-30b": (1, 4, 16, 4096)},
}
