/* What the stubs of the CUDA runtime and driver share: the log of requests, and what the device says of itself. */
#pragma once

/* One request of the program: its kind, a letter (see request_log.c), and what was asked for. */
void fake_request(const char *kind, const char *what);

/* The value of a device attribute; the driver numbers them as the runtime does. */
int fake_attribute(int attribute);

/* How many devices there are, and the one of this thread. */
int fake_devices(void);
int fake_device(void);

/* Bytes of a device's memory. */
#define FAKE_MEMORY 150700000000ul
