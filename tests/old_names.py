"""Names that were documented as `yobx_flatten.NAME` once: they stay importable, and `make types` knows their types."""

import yobx_flatten as yf

OLD = [
    yf.AlreadyRegisteredError, yf.CacheStructureError, yf.Call, yf.CaseReport, yf.CaseResult, yf.DamagedFileError,
    yf.Difference, yf.Drawing, yf.DrawingRow, yf.DynamicShapesError, yf.Explanation, yf.ExportedFolder, yf.Finding,
    yf.Findings, yf.FlatteningRow, yf.FolderCheck, yf.FolderExistsError, yf.FolderManifest, yf.FolderReport,
    yf.ForeignFileError, yf.GenerationError, yf.GenerationSettings, yf.InvalidArgumentError,
    yf.InvalidRegistrationError, yf.Leaf, yf.MissingDependencyError, yf.ModelSourceError, yf.NotRegisteredError,
    yf.OutputDifference, yf.RecordError, yf.RecordReplay, yf.ReplayError, yf.RoundTripError, yf.SpecMismatchError,
    yf.StaticDataError, yf.StoredCase, yf.StoredFileError, yf.Undo, yf.Unregistered, yf.UnsetFieldError,
    yf.UnsupportedLayerError, yf.flatten_base_model_output, yf.flatten_dynamic_cache,
    yf.flatten_encoder_decoder_cache, yf.flatten_static_cache, yf.flatten_with_keys_base_model_output,
    yf.flatten_with_keys_dynamic_cache, yf.flatten_with_keys_encoder_decoder_cache, yf.flatten_with_keys_static_cache,
    yf.unflatten_base_model_output, yf.unflatten_dynamic_cache, yf.unflatten_encoder_decoder_cache,
    yf.unflatten_static_cache,
]  # fmt: skip
