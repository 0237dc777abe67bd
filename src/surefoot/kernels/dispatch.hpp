// Operators of this library (and of torch's dispatcher altogether) called from C++ by name.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

namespace {

// Look it up once: `static const auto f = operation<Tensor(const Tensor&)>("surefoot::f");`
template <class Signature>
auto operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace
