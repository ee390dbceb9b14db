from types import ModuleType

from sglang_epd.platform import kernels


def test_the_device_has_a_name_for_file_names() -> None:
    module = ModuleType("fp8_kernel")
    kernels.install(module)
    assert module.get_device_name().replace(" ", "_") == module.get_device_name(0) == "cpu"
