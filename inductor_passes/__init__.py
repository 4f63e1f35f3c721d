"""TorchInductor passes for fully sharded data parallel graphs: re-gather, bucket, reorder.

`install(config)` makes every later `torch.compile` run them on graphs of wrapped models; `options(config)` does the
same for one `torch.compile(model, options=...)`. Importing the package changes nothing.
"""

from inductor_passes.config import PassConfig
from inductor_passes.debug import aot_eager_backend
from inductor_passes.install import install, installed, options, uninstall

__all__ = ["PassConfig", "aot_eager_backend", "install", "installed", "options", "uninstall"]
