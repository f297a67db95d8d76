from .budget import (
    Budget as Budget,
    budget_of as budget_of,
    enforce as enforce,
    limit_lifted as limit_lifted,
    settle_heap as settle_heap,
)
from .device import (
    PACKING_BYTES as PACKING_BYTES,
    Device as Device,
    DeviceSpeed as DeviceSpeed,
    cpu_device as cpu_device,
    device_at_hand as device_at_hand,
    device_of as device_of,
    device_speed as device_speed,
    devices as devices,
    find_device as find_device,
)
from .links import Link as Link, link_between as link_between, link_to_host as link_to_host
