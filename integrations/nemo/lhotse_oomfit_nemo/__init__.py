"""``bucket_batch_size=auto`` in an unmodified NeMo training script.

Nothing needs to be imported: Lightning loads :func:`lhotse_oomfit_nemo.plugin.callbacks` by its entry point.
"""
