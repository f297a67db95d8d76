from .export import check_format as check_format, export_run as export_run, require_run as require_run
from .hub import UploadResult as UploadResult, upload as upload
from .merge import merge_run as merge_run, merging_of as merging_of
