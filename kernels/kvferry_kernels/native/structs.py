"""The structs of ``source/*.h``, field by field."""

import ctypes

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class Threads(ctypes.Structure):
    """``kvf_threads``."""

    _fields_ = [
        ("parallel", _POINTER),
        ("thread_number", _POINTER),
        ("team_size", _POINTER),
        ("count", ctypes.c_int32),
    ]


class Cache(ctypes.Structure):
    """``kvf_cache``."""

    _fields_ = [
        ("memory", _POINTER),
        ("blocks", _INT),
        ("layers", _INT),
        ("kv_heads", _INT),
        ("block_size", _INT),
        ("dim", _INT),
    ]


class Batch(ctypes.Structure):
    """``kvf_batch``."""

    _fields_ = [
        ("tokens", _INT),
        ("rows", _INT),
        ("table_width", _INT),
        ("starts", _POINTER),
        ("contexts", _POINTER),
        ("tables", _POINTER),
        ("slots", _POINTER),
    ]


class Layer(ctypes.Structure):
    """``kvf_layer``."""

    _fields_ = [(name, _POINTER) for name in ("attention_norm", "qkv", "output", "mlp_norm", "gate", "up", "down")]


class Decoder(ctypes.Structure):
    """``kvf_decoder``."""

    _fields_ = [
        ("hidden", _INT),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("dim", _INT),
        ("inner", _INT),
        ("layers", _INT),
        ("vocab", _INT),
        ("eps", ctypes.c_float),
        ("embedding", _POINTER),
        ("weights", _POINTER),
    ]


class Step(ctypes.Structure):
    """``kvf_step``."""

    _fields_ = [("token_ids", _POINTER), ("phases", _POINTER), ("hidden", _POINTER), ("work", _POINTER)]
