from types import SimpleNamespace

from sglang_epd.platform import latent_attention


def test_torch_native_attention_always_absorbs() -> None:
    registered = {}
    handlers = SimpleNamespace(
        AttnForwardMethod=SimpleNamespace(MLA="absorbed", MHA="by heads"),
        AttentionBackendRegistry=SimpleNamespace(register=registered.__setitem__),
    )
    latent_attention.install(handlers)
    assert registered.keys() == {"torch_native"}
    assert registered["torch_native"](object(), object()) == "absorbed"
