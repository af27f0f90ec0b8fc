#pragma once

#define LOG_ERR(...) ((void) 0)
