#pragma once

#include "native.h"

#include <optional>

class controls {
  public:
    explicit controls(uintptr_t address);
    explicit controls(std::shared_ptr<context_handle> handle);
    ~controls();

    controls(const controls &) = delete;

    int32_t prompt_begin(int32_t n_new, llama_seq_id seq_id);
    void    prompt_end(llama_seq_id seq_id, bool aborted);
    bool    join(const controls & member);
    void    reset();
    void    set_callback(py::object function);
    void    close();

    py::dict                   stats() const;
    std::string                json() const;
    std::optional<std::string> failure() const;

    llama_context * living() const; // null: closed

    bool closed = false;

  private:
    llama_context * use() const; // raises EngineClosed
    int32_t         checked(int32_t result);

    static void on_event(const llama_phase_event * event, void * user_data);

    std::shared_ptr<context_handle> handle; // of one of our contexts; else `ctx`
    llama_context                 * ctx = nullptr;
    pid_t                           owner;
    py::object                      callback;
};
