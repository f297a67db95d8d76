from .comparison import Check as Check, Difference as Difference, ResumeProof as ResumeProof
from .run import verify_resume as verify_resume
