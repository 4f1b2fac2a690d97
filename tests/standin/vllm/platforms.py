from types import SimpleNamespace

from vllm.config import DeviceConfig

current_platform = SimpleNamespace(device_type=DeviceConfig().device_type)
