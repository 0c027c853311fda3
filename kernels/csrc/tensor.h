// torch tensors as arguments of bound functions, checked at the border.
//
// Read through DLPack's C table (torch >= 2.10) in 0.1 us; nanobind's own ndarray goes through Python, 5 us a tensor.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "dtype.h"

namespace chunkserve {

// A tensor that the caller holds for the length of the call.
class TensorArg {
 public:
  nanobind::dlpack::dltensor view;

  // False, with no Python error set, when `object` offers no DLPack table or does not fit it.
  bool read(PyObject* object) noexcept {
    const Exchange* exchange = exchange_of(Py_TYPE(object));
    if (exchange && exchange->dltensor_from_py_object(object, &view) == 0) return true;
    PyErr_Clear();
    return false;
  }

 private:
  // DLPackExchangeAPI of dlpack.h, version 1.
  struct Exchange {
    struct {
      std::uint32_t major, minor;
      void* older;
    } header;
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object;
    void* managed_tensor_to_py_object;
    int (*dltensor_from_py_object)(void* object, nanobind::dlpack::dltensor* out);
    void* current_work_stream;
  };

  static const Exchange* exchange_of(PyTypeObject* type) noexcept {
    // Nearly always torch.Tensor. The GIL guards this.
    static PyTypeObject* last_type = nullptr;
    static const Exchange* last = nullptr;
    if (type == last_type) return last;
    PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    if (!capsule) return nullptr;
    const auto* found = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (!found || found->header.major != 1) return nullptr;
    Py_XDECREF(last_type);
    Py_INCREF(type);  // so that no other type takes its address, which is the key
    last_type = type;
    return last = found;
  }
};

// A contiguous fp32 or bf16 tensor on the CPU; of int8 where that is said.
struct Tensor {
  const char* name;
  void* data;
  DType dtype;
  int ndim;
  long shape[3] = {1, 1, 1};

  // Throws std::invalid_argument unless the argument is one, with `dims` dimensions.
  Tensor(const char* name, const TensorArg& arg, int dims, bool may_be_i8 = false) : name(name), ndim(dims) {
    namespace dlpack = nanobind::dlpack;
    const dlpack::dltensor& view = arg.view;
    if (view.device.device_type != nanobind::device::cpu::value) fail("must be on the CPU");
    if (view.ndim != dims) {
      fail("has " + std::to_string(view.ndim) + " dimensions; expected " + std::to_string(dims));
    }
    if (view.dtype == nanobind::dtype<float>()) {
      dtype = DType::f32;
    } else if (view.dtype.code == static_cast<std::uint8_t>(dlpack::dtype_code::Bfloat) && view.dtype.bits == 16) {
      dtype = DType::bf16;
    } else if (may_be_i8 && view.dtype == nanobind::dtype<std::int8_t>()) {
      dtype = DType::i8;
    } else {
      fail(may_be_i8 ? "must be float32, bfloat16 or int8" : "must be float32 or bfloat16");
    }
    data = static_cast<char*>(view.data) + view.byte_offset;
    for (int i = 0; i < dims; ++i) shape[i] = static_cast<long>(view.shape[i]);
    if (std::find(shape, shape + dims, 0) != shape + dims) return;
    long stride = 1;
    for (int i = dims - 1; i >= 0; --i) {
      if (shape[i] > 1 && view.strides[i] != stride) fail("must be contiguous; call .contiguous()");
      stride *= shape[i];
    }
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
  long element_bytes() const { return chunkserve::element_bytes(dtype); }
  // Start of row `index` of a matrix.
  void* row(long index) const { return as<char>() + index * shape[1] * element_bytes(); }

  std::string shape_text() const { return text(shape, ndim); }

  // `because`: the tensors that the expectation comes from.
  void require_shape(std::initializer_list<long> expected, std::initializer_list<const Tensor*> because) const {
    if (std::equal(expected.begin(), expected.end(), shape)) return;
    std::string message = "is " + shape_text() + "; expected " + text(expected.begin(), ndim);
    const char* separator = ": ";
    for (const Tensor* tensor : because) {
      message += separator + std::string(tensor->name) + " is " + tensor->shape_text();
      separator = ", ";
    }
    fail(message);
  }
  void require_dtype(DType expected) const {
    if (dtype != expected) fail(std::string("must be ") + (expected == DType::f32 ? "float32" : "bfloat16"));
  }
  void require_dtype(const Tensor& other) const {
    if (dtype != other.dtype) fail(std::string("must have the dtype of ") + other.name);
  }

 private:
  static std::string text(const long* sizes, int count) {
    std::string out = "[";
    for (int i = 0; i < count; ++i) out += (i ? ", " : "") + std::to_string(sizes[i]);
    return out + "]";
  }
  [[noreturn]] void fail(const std::string& what) const { throw std::invalid_argument(std::string(name) + " " + what); }
};

}  // namespace chunkserve

template <>
struct nanobind::detail::type_caster<chunkserve::TensorArg> {
  NB_TYPE_CASTER(chunkserve::TensorArg, const_name("torch.Tensor"))

  bool from_python(handle source, std::uint32_t, cleanup_list*) noexcept { return value.read(source.ptr()); }
};
