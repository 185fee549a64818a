"""Times of training steps: processes that take steps of one source tree each, and what their times say."""
